"""Kernels for a GPU, in Triton. Whoever uses them does without where there is no Triton."""
