"""Data sets, where they come from, and how they are shared out."""

from fedcog.data.datasets import DataError, Dataset, from_arrays, from_torch
from fedcog.data.federated import FederatedData
from fedcog.data.folders import from_folder
from fedcog.data.rules import PartitionError
from fedcog.data.sources import SOURCES

__all__ = [
    "SOURCES",
    "DataError",
    "Dataset",
    "FederatedData",
    "PartitionError",
    "from_arrays",
    "from_folder",
    "from_torch",
]
