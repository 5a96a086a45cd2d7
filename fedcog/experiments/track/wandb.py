"""A run in Weights & Biases: at its server if somebody is logged in there, else in files in the run's directory."""

import netrc
import os
import secrets
import urllib.parse
import warnings
from pathlib import Path
from typing import Any

import wandb
from torch import Tensor

from fedcog.experiments.config import Experiment
from fedcog.experiments.track.offline import last_step
from fedcog.experiments.track.tracking import End, TrackWarning
from fedcog.experiments.track.values import settings

PROJECT = "fedcog"
PATIENCE = 30.0  # seconds that a server may take to answer; W&B's own are 90, and $WANDB_INIT_TIMEOUT is yours


class WandB:
    """Numbers and images by round, settings as the configuration; in the project $WANDB_PROJECT, or fedcog.

    $WANDB_MODE=offline writes files alone. So does who is not logged in, rather than be asked in the midst of a run.
    """

    def __init__(self, path: Path, experiment: Experiment, run: str, told: int) -> None:
        self.run, offline = run or secrets.token_hex(8), _unknown_here()
        self.here = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.run,
            name="/".join(path.absolute().parts[-2:]),
            dir=str(path),
            config=dict(settings(experiment)),
            resume="allow",
            reinit="create_new",  # a comparison's seeds may go side by side
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, **_promptly()),
        )
        # What was told is not yet kept: a run that is killed takes the last seconds of W&B's memory with it.
        kept = last_step(path / "wandb", self.run) if self.here.offline else self.here.starting_step - 1
        self.told = max(0, kept) if run else 0
        if offline:
            warnings.warn(
                f"nobody is logged in to Weights & Biases: the run is kept in {path / 'wandb'}, to be sent with "
                f"`wandb sync` (or say WANDB_MODE=offline, or `wandb login`)",
                TrackWarning,
                stacklevel=2,
            )

    def tell(self, round: int, numbers: dict[str, float], picture: Tensor | None) -> None:
        """Add a round as one step of W&B's."""
        told: dict[str, Any] = dict(numbers)
        if picture is not None:
            told["generated"] = wandb.Image(picture.permute(1, 2, 0).numpy())
        self.here.log(told, step=round, commit=True)

    def close(self, end: End) -> None:
        """Finish it: as failed, if training diverged."""
        self.here.finish(exit_code=1 if end == "diverged" else 0)


def _promptly() -> dict[str, Any]:
    """Settings, in versions that have them: files are written every second, and who is out of reach is given up."""
    wanted = {"x_transaction_log_flush_interval": 1.0}
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        wanted["init_timeout"] = PATIENCE
    return {name: value for name, value in wanted.items() if name in wandb.Settings.model_fields}


def _unknown_here() -> bool:
    """Would W&B talk to its server, and has nobody's key to do it with?"""
    known = wandb.setup().settings
    if known.mode != "online" or known.api_key:
        return False
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(
            urllib.parse.urlparse(known.base_url).hostname or ""
        )
    except (OSError, netrc.NetrcParseError):
        return True
    return found is None
