"""Every table and figure of the paper as experiments, with its numbers (Ye et al., ICLR 2024)."""

from fedcog.studies.paper.index import studies

__all__ = ["studies"]
