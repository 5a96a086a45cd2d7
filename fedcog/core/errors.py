"""Exceptions that several folders raise and handle."""


class Interrupted(Exception):
    """A run stopped on request, after a complete round."""
