"""Hyperparameter tuning with the same budget for every algorithm."""
