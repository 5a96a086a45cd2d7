"""The live dashboard: a read-only web page about runs in progress, served to this machine only."""

from fedcog.report.dashboard.web_server import DashboardServer

__all__ = ["DashboardServer"]
