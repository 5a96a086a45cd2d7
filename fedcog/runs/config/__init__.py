"""The configuration of an experiment, and the user's own code in it."""
