"""Data sets, where they come from, and how they are partitioned among clients."""

from fedcog.data.client_batches import FederatedData
from fedcog.data.datasets import DataError, Dataset, from_arrays, from_torch
from fedcog.data.folders import from_folder
from fedcog.data.partitions.base import PartitionError
from fedcog.data.registry import DATASETS
from fedcog.data.sources.locations import load_dataset

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "FederatedData",
    "PartitionError",
    "from_arrays",
    "from_folder",
    "from_torch",
    "load_dataset",
]
