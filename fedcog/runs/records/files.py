"""Files that are written whole or not at all, and JSON without NaN."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save

from fedcog.core.tree import Params


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and rename it.

    Args:
        path: The file.
        content: Its new content.
    """
    with temporary_file(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to a file; at the end it is flushed and replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes its files readable by their owner only
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)  # or the new name may not survive a power cut
    finally:
        temporary.unlink(missing_ok=True)


def pack_tensors(tensors: Params, info: dict[str, Any]) -> bytes:
    """Encode tensors as safetensors.

    Args:
        tensors: Tensors by name.
        info: Stored as JSON under "about".

    Returns:
        The content of the file.
    """
    return save(*tensors_and_metadata(tensors, info))


def tensors_and_metadata(tensors: Params, info: dict[str, Any]) -> tuple[Params, dict[str, str]]:
    """Return what safetensors stores.

    There is one metadata entry only, because safetensors writes several in random order.

    Args:
        tensors: Tensors by name.
        info: What the file says about itself.

    Returns:
        Contiguous tensors in host memory, and the metadata.
    """
    on_host = {key: value.detach().to("cpu").contiguous() for key, value in tensors.items()}
    return on_host, {"about": json.dumps(info, sort_keys=True)}


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
