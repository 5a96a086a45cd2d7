"""Weights & Biases: at its server if a user is logged in, otherwise in the run directory."""

import netrc
import os
import secrets
import urllib.parse
import warnings
from pathlib import Path
from typing import Any

import wandb
from torch import Tensor

from fedcog.runs.config.experiment import Experiment
from fedcog.runs.tracking.tracker import RunStatus, Tracker, TrackerWarning
from fedcog.runs.tracking.values import flat_settings
from fedcog.runs.tracking.wandb_files import last_step

PROJECT = "fedcog"
INIT_TIMEOUT_SECONDS = 30.0
"""How long a server may take to answer; W&B's default is 90 s. $WANDB_INIT_TIMEOUT overrides it."""


class WandB(Tracker):
    """Logs metrics and images by round, and settings as the configuration.

    The project is $WANDB_PROJECT, or fedcog. $WANDB_MODE=offline writes files only; so does a user
    who is not logged in, instead of a question in the middle of a run.
    """

    def open(self, path: Path, experiment: Experiment, run_id: str, last_round: int) -> None:
        """Start a run, or continue it.

        Args:
            path: The run directory.
            experiment: The experiment.
            run_id: W&B's id of the run, if it was logged before.
            last_round: Ignored: W&B knows which rounds it has.
        """
        self.run_id = run_id or secrets.token_hex(8)
        is_logged_out = _is_logged_out()
        self.session = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.run_id,
            name="/".join(path.absolute().parts[-2:]),
            dir=str(path),
            config=dict(flat_settings(experiment)),
            resume="allow",
            reinit="create_new",  # the seeds of a comparison may run at the same time
            mode="offline" if is_logged_out else None,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                **_available_settings(),
            ),
        )
        # W&B buffers: a killed run loses what was logged in its last seconds.
        self.last_round = 0
        if run_id and self.session.offline:
            self.last_round = max(0, last_step(path / "wandb", self.run_id))
        elif run_id:
            self.last_round = max(0, self.session.starting_step - 1)
        if is_logged_out:
            warnings.warn(
                f"not logged in to Weights & Biases: the run is stored in {path / 'wandb'}; send "
                "it with `wandb sync` (or set WANDB_MODE=offline, or use `wandb login`)",
                TrackerWarning,
                stacklevel=2,
            )

    def log(self, round: int, metrics: dict[str, float], image: Tensor | None) -> None:
        """Log a round as one step.

        Args:
            round: The round, from 1.
            metrics: Values by name.
            image: `(3, H, W)`, uint8.
        """
        values: dict[str, Any] = dict(metrics)
        if image is not None:
            values["generated"] = wandb.Image(image.permute(1, 2, 0).numpy())
        self.session.log(values, step=round, commit=True)

    def close(self, status: RunStatus) -> None:
        """Finish the run; as failed if training diverged."""
        self.session.finish(exit_code=1 if status == "diverged" else 0)


def _available_settings() -> dict[str, Any]:
    """Return settings that this version of W&B has: write files every second, time out soon."""
    wanted = {"x_transaction_log_flush_interval": 1.0}
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        wanted["init_timeout"] = INIT_TIMEOUT_SECONDS
    return {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}


def _is_logged_out() -> bool:
    """Return whether W&B would use its server but has no API key."""
    settings = wandb.setup().settings
    if settings.mode != "online" or settings.api_key:
        return False
    host = urllib.parse.urlparse(settings.base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is None
    except (OSError, netrc.NetrcParseError):
        return True
