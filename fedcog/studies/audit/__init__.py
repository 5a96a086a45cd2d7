"""The audit of a run: what updates and generated inputs reveal about training examples."""
