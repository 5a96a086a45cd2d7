"""Many runs with one purpose: the paper's tables, the theory, hyperparameter tuning."""
