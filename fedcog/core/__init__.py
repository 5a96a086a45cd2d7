"""Building blocks without clients: dicts of tensors, random numbers, settings, tasks."""
