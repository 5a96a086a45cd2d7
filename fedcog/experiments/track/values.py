"""What of a run a tracker is told: a round's numbers under flat names, its settings, and its pictures as one."""

import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedcog.experiments.config import Experiment

LONGEST = 250  # letters of a name, which is as many as MLflow takes
SIDE = 4096  # pixels that a picture may be wide or high


def values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round's line: its own, those of seconds/ and privacy/, bytes/ of all, means over clients/."""
    found: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": inner for key, inner in value.items()}
        elif name in ("skipped", "refused", "forgot") and isinstance(value, list):
            found[name] = len(value)
        elif name != "round":
            found[name] = value
    local = [client for client in line.get("local", ()) if isinstance(client, Mapping)]
    for name in dict.fromkeys(name for client in local for name in client):
        numbers = [float(client[name]) for client in local if _number(client.get(name))]
        if numbers and name in ("down", "up"):
            found[f"bytes/{name}"] = sum(numbers)
        elif numbers and name != "client":
            found[f"clients/{name}"] = statistics.fmean(numbers)
    return {_plain(name): float(value) for name, value in found.items() if _number(value)}


def settings(experiment: Experiment) -> dict[str, str | int | float | bool]:
    """Every setting of an experiment, an algorithm's own under its name."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in experiment.to_dict().items():
        inner = {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        flat |= {_plain(key): one for key, one in inner.items()}
    return flat


def sheet(shown: Mapping[str, Tensor]) -> Tensor | None:
    """Generated pictures as one of [3, H, W] bytes: a row for each mark on the way, a column for each target."""
    images = shown.get("images")
    if images is None or images.dim() != 5 or images.dtype != torch.uint8 or not images.numel():
        return None
    images = images[:, :, :3] if images.shape[2] >= 3 else images[:, :, :1].expand(-1, -1, 3, -1, -1)
    rows, columns, _, height, width = images.shape
    images = images[:, : max(1, SIDE // (width + 1))]
    framed = torch.nn.functional.pad(images, (0, 1, 0, 1))  # a black line between each and the next
    columns = framed.shape[1]
    whole = framed.permute(2, 0, 3, 1, 4).reshape(3, rows * (height + 1), columns * (width + 1))
    return whole[:, :SIDE, :SIDE].contiguous()


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plain(name: str) -> str:
    """A name of letters that all trackers take."""
    return re.sub(r"[^\w./ -]", "_", str(name))[:LONGEST]
