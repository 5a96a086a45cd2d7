"""FedAvg: the base class as it stands. `fedcog/algorithms/base.py` has its hooks."""

from fedcog.algorithms.base import Algorithm

FedAvg = Algorithm
"""FedAvg (McMahan et al., AISTATS 2017)."""
