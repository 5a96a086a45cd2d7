"""What trackers log of a run: metrics of a round, settings, generated images as one."""

import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedcog.runs.config.experiment import Experiment

MAX_NAME_LENGTH = 250
"""Characters of a name that MLflow accepts."""
MAX_IMAGE_SIDE = 4096
"""Pixels per side of a logged image."""


def round_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Flatten a line of `rounds.jsonl` into metrics.

    Args:
        line: The round's line.

    Returns:
        The line's own numbers, `seconds/` and `privacy/`, `bytes/` summed and `clients/` averaged
        over clients. `metrics/class_accuracy/0` is the first number of a list.
    """
    found: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            for key, inner in value.items():
                found[f"{name}/{key}"] = inner
                if isinstance(inner, list):
                    found |= {f"{name}/{key}/{index}": one for index, one in enumerate(inner)}
        elif name in ("skipped", "refused", "forgot") and isinstance(value, list):
            found[name] = len(value)
        elif name != "round":
            found[name] = value
    local = [client for client in line.get("local", ()) if isinstance(client, Mapping)]
    for name in dict.fromkeys(name for client in local for name in client):
        numbers = [float(client[name]) for client in local if _is_number(client.get(name))]
        if numbers and name in ("down", "up"):
            found[f"bytes/{name}"] = sum(numbers)
        elif numbers and name != "client":
            found[f"clients/{name}"] = statistics.fmean(numbers)
    return {_safe_name(name): float(value) for name, value in found.items() if _is_number(value)}


def flat_settings(experiment: Experiment) -> dict[str, str | int | float | bool]:
    """Return every setting of an experiment; an algorithm's as ALGORITHM.SETTING."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in experiment.to_dict().items():
        if isinstance(value, dict):
            flat |= {_safe_name(f"{name}.{key}"): inner for key, inner in value.items()}
        else:
            flat[_safe_name(name)] = value
    return flat


def image_sheet(artifacts: Mapping[str, Tensor]) -> Tensor | None:
    """Arrange generated images as one image.

    Args:
        artifacts: With `"images"` `(M, N, C, H, W)`, uint8: N inputs after M steps.

    Returns:
        `(3, H', W')`, uint8: a row per step, a column per input; None if there are no images.
    """
    images = artifacts.get("images")
    if images is None or images.dim() != 5 or images.dtype != torch.uint8 or not images.numel():
        return None
    if images.shape[2] >= 3:
        images = images[:, :, :3]
    else:
        images = images[:, :, :1].expand(-1, -1, 3, -1, -1)
    num_rows, _, _, height, width = images.shape
    images = images[:, : max(1, MAX_IMAGE_SIDE // (width + 1))]
    framed = torch.nn.functional.pad(images, (0, 1, 0, 1))  # a black line between neighbors
    num_columns = framed.shape[1]
    sheet = framed.permute(2, 0, 3, 1, 4).reshape(
        3, num_rows * (height + 1), num_columns * (width + 1)
    )
    return sheet[:, :MAX_IMAGE_SIDE, :MAX_IMAGE_SIDE].contiguous()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _safe_name(name: str) -> str:
    """Return a name of characters that all trackers accept."""
    return re.sub(r"[^\w./ -]", "_", str(name))[:MAX_NAME_LENGTH]
