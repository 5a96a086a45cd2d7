"""A run in MLflow: at the server or in the store that $MLFLOW_TRACKING_URI names, else in MLflow's own default."""

import contextlib
import logging
import os
import time
import warnings
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from torch import Tensor

from fedcog.experiments.config import Experiment
from fedcog.experiments.track.tracking import End, TrackWarning
from fedcog.experiments.track.values import settings

NAME = "fedcog"
VALUE = 6000  # letters that a parameter may have
AT_ONCE = 100  # parameters that a request may have
ENDS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED"}
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own would hold a run up for minutes when a server is gone; set by you, they stay as they are."""
TRIES = 3
"""How often a database is opened: MLflow's ten would take as long, and each is told of."""


class MLflow:
    """Metrics and images by round, settings as parameters; in the experiment $MLFLOW_EXPERIMENT_NAME, or fedcog."""

    def __init__(self, path: Path, experiment: Experiment, run: str, told: int) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if not mlflow.get_tracking_uri().startswith("http"):
            _open_promptly()
        self.client = MlflowClient()
        there = bool(run) and self._there(run)
        if run and not there:
            where = mlflow.get_tracking_uri()
            warnings.warn(
                f"mlflow knows no run {run} at {where}: it is told all in a new one.", TrackWarning, stacklevel=2
            )
        self.run, self.told = run if there else self._begun(path, experiment), 0
        if self.run == run:
            history = self.client.get_metric_history(run, "seconds/total")  # of every round: the server knows best
            self.told = max((int(one.step) for one in history), default=0)
            self.client.update_run(run, status="RUNNING")

    def _there(self, run: str) -> bool:
        try:
            return bool(self.client.get_run(run).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _begun(self, path: Path, experiment: Experiment) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or NAME
        there = self.client.get_experiment_by_name(name)
        place = there.experiment_id if there else self.client.create_experiment(name)
        run = str(self.client.create_run(place, run_name="/".join(path.absolute().parts[-2:])).info.run_id)
        params = [Param(key, str(value)[:VALUE]) for key, value in settings(experiment).items()]
        for first in range(0, len(params), AT_ONCE):
            self.client.log_batch(run, params=params[first : first + AT_ONCE])
        return run

    def tell(self, round: int, numbers: dict[str, float], picture: Tensor | None) -> None:
        """Add a round: its image first, for the numbers say that it is there."""
        if picture is not None:
            image = picture.permute(1, 2, 0).numpy()
            self.client.log_image(self.run, image, artifact_file=f"generated/{round:05d}.png")
        now = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(name, one, now, round) for name, one in numbers.items()])

    def close(self, end: End) -> None:
        """Say how it ended."""
        self.client.set_terminated(self.run, ENDS[end])


def _open_promptly() -> None:
    """Have a database that cannot be opened given up soon and quietly: whoever tracks tells why."""
    with contextlib.suppress(ImportError):  # files need no database
        from mlflow.store.db import utils

        utils.MAX_RETRY_COUNT = min(TRIES, utils.MAX_RETRY_COUNT)
        logging.getLogger(utils.__name__).setLevel(logging.ERROR)
