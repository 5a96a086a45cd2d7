"""Provenance of results: command, time, versions, machine and commit."""

import contextlib
import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import fedcog

GIT_TIMEOUT_SECONDS = 10
ROOT = Path(__file__).parents[3]
"""The folder that holds the package; a git repository in a checkout."""


def provenance(command: str | None, device: torch.device) -> dict[str, Any]:
    """Describe this process.

    Args:
        command: The command line; Python's by default.
        device: Where it computes.

    Returns:
        The content of `provenance.json`.
    """
    hardware = platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return {
        "command": command or shlex.join(["python", *sys.argv]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fedcog": fedcog.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": hardware,
        "system": platform.system(),
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of this package: $FEDCOG_COMMIT, or what git says, or "unknown"."""
    if given := os.environ.get("FEDCOG_COMMIT"):  # for a copy without its history
        return given
    if not (ROOT / ".git").exists():  # installed; a repository around it is another project's
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_SECONDS
        )
        return done.stdout.strip()
    return "unknown"
