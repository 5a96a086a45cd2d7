"""The FLAIR data set: its file layouts, HDF5 files and the decoded copy on disk."""
