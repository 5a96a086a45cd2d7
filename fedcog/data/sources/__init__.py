"""Data sets by name or location: registered names, folders, .npz files, Hugging Face data sets."""

from fedcog.data.sources.locations import ReadOptions, load_dataset

__all__ = ["ReadOptions", "load_dataset"]
