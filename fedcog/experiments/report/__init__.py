"""A page about one run or several, whole in itself: read from run files, with nothing computed and nothing fetched."""

from fedcog.experiments.report.figures import partition_figure
from fedcog.experiments.report.page import page

__all__ = ["page", "partition_figure"]
