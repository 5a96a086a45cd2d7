"""The server loop, and the backends that train the clients of a round."""
