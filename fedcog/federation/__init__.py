"""How a round is carried out: cohorts of clients, their states, what they send, and who plays them."""
