"""HTML reports about runs: self-contained pages, read from run directories."""

from fedcog.report.figures import partition_figure
from fedcog.report.page import page

__all__ = ["page", "partition_figure"]
