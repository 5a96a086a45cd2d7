"""Layers that compute many models at once, and the kernels behind them."""
