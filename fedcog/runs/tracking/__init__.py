"""Trackers: a run logged live to TensorBoard, MLflow, Weights & Biases or a tracker of yours.

To add a built-in tracker: write its file with a subclass of `Tracker`, and add it to `TRACKERS`.
"""

from fedcog.runs.tracking.tracker import (
    TRACKERS,
    RunStatus,
    Tracker,
    Trackers,
    TrackerWarning,
    check_trackers,
)

__all__ = ["TRACKERS", "RunStatus", "Tracker", "TrackerWarning", "Trackers", "check_trackers"]
