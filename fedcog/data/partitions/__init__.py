"""Partitions: ways to split a training set among clients."""
