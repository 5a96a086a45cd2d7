"""Run directories: what a run records, and what is read back, summarized and exported."""
