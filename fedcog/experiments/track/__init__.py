"""A run followed elsewhere, in TensorBoard, MLflow or Weights & Biases, live, while it is carried out."""

from fedcog.experiments.track.tracking import TRACKERS, Tracking, TrackWarning, chosen

__all__ = ["TRACKERS", "TrackWarning", "Tracking", "chosen"]
