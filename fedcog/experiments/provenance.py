"""Where results come from: the command, the time, the versions, the machine and the commit."""

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


def provenance(command: str | None, device: torch.device) -> dict[str, Any]:
    """Who computes here and now: command, time, versions, machine."""
    return {
        "command": command or shlex.join(["python", *sys.argv]),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fedcog": fedcog.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "system": platform.system(),
        "commit": commit(),
    }


def commit() -> str:
    """Of fedcog's own sources: as $FEDCOG_COMMIT tells it (for a copy without its history), or else as git does."""
    if told := os.environ.get("FEDCOG_COMMIT"):
        return told
    folder = Path(__file__).parents[2]
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    if not (folder / ".git").exists():  # installed: what lies around it may be somebody else's project
        return "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return "unknown"
