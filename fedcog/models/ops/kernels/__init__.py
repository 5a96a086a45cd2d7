"""Triton kernels, and how they are launched and compiled ahead of time."""
