"""MLflow: at the server or store that $MLFLOW_TRACKING_URI names, else MLflow's own default."""

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

from fedcog.runs.config.experiment import Experiment
from fedcog.runs.tracking.tracker import RunStatus, Tracker, TrackerWarning
from fedcog.runs.tracking.values import flat_settings

EXPERIMENT_NAME = "fedcog"
MAX_PARAM_LENGTH = 6000
MAX_PARAMS_PER_REQUEST = 100
STATUSES = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED"}
TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's defaults would block a run for minutes when a server is gone. The user's values stay."""
MAX_DATABASE_ATTEMPTS = 3
"""MLflow's ten attempts to open a database would take as long, and log each."""


class MLflow(Tracker):
    """Logs metrics and images by round, and settings as parameters.

    The MLflow experiment is $MLFLOW_EXPERIMENT_NAME, or fedcog.
    """

    def open(self, path: Path, experiment: Experiment, run_id: str, last_round: int) -> None:
        """Start a run, or continue it.

        Args:
            path: The run directory.
            experiment: The experiment.
            run_id: MLflow's id of the run, if it was logged before.
            last_round: Ignored: MLflow knows which rounds it has.
        """
        for name, value in TIMEOUTS.items():
            os.environ.setdefault(name, value)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri = mlflow.get_tracking_uri()
        if not uri.startswith("http"):
            _limit_database_attempts()
        self.client = MlflowClient()
        exists = bool(run_id) and self._exists(run_id)
        if run_id and not exists:
            warnings.warn(
                f"mlflow has no run {run_id} at {uri}: a new one gets all rounds.",
                TrackerWarning,
                stacklevel=2,
            )
        self.run_id = run_id if exists else self._create_run(path, experiment)
        self.last_round = 0
        if exists:
            # every round logs this metric
            history = self.client.get_metric_history(run_id, "seconds/total")
            self.last_round = max((int(metric.step) for metric in history), default=0)
            self.client.update_run(run_id, status="RUNNING")

    def log(self, round: int, metrics: dict[str, float], image: Tensor | None) -> None:
        """Log a round: its image first, because the metrics mark the round as logged.

        Args:
            round: The round, from 1.
            metrics: Values by name.
            image: `(3, H, W)`, uint8.
        """
        if image is not None:
            array = image.permute(1, 2, 0).numpy()
            self.client.log_image(self.run_id, array, artifact_file=f"generated/{round:05d}.png")
        now = int(1000 * time.time())
        self.client.log_batch(
            self.run_id,
            metrics=[Metric(name, value, now, round) for name, value in metrics.items()],
        )

    def close(self, status: RunStatus) -> None:
        """Set the status of the run."""
        self.client.set_terminated(self.run_id, STATUSES[status])

    def _exists(self, run_id: str) -> bool:
        try:
            return bool(self.client.get_run(run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _create_run(self, path: Path, experiment: Experiment) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT_NAME
        existing = self.client.get_experiment_by_name(name)
        experiment_id = existing.experiment_id if existing else self.client.create_experiment(name)
        run_name = "/".join(path.absolute().parts[-2:])
        run_id = str(self.client.create_run(experiment_id, run_name=run_name).info.run_id)
        params = [
            Param(key, str(value)[:MAX_PARAM_LENGTH])
            for key, value in flat_settings(experiment).items()
        ]
        for start in range(0, len(params), MAX_PARAMS_PER_REQUEST):
            self.client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_REQUEST])
        return run_id


def _limit_database_attempts() -> None:
    """Give up soon and quietly on a database that cannot be opened; the tracker reports why."""
    with contextlib.suppress(ImportError):  # a store of files needs no database
        from mlflow.store.db import utils

        utils.MAX_RETRY_COUNT = min(MAX_DATABASE_ATTEMPTS, utils.MAX_RETRY_COUNT)
        logging.getLogger(utils.__name__).setLevel(logging.ERROR)
