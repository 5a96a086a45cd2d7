"""Networks as pure functions, the network zoo, generators, and checks of a user's network."""
