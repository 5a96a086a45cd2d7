"""Images of a run on the dashboard: its partition, and the inputs generated in a round."""

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedcog.report.dashboard.run_follower import FileStamp, RunFollower, stamp_of
from fedcog.report.markup import printable
from fedcog.runs.records.run_directory import RecordError

MAX_FILE_BYTES = 256 * 2**20
MAX_PARTITION_CELLS = 200_000
"""Number of clients times classes up to which a partition is drawn."""
MAX_COLUMNS = 12
MAX_ROWS = 8
MAX_IMAGE_SIDE = 512
MAX_CACHED_IMAGES = 200
PIXELATED_BELOW = 64

DRAWING_ERRORS = (
    RecordError,
    LookupError,
    ArithmeticError,
    ValueError,
    TypeError,
    RuntimeError,
)
"""What drawing may raise if a file has unexpected content."""


class ImageCache:
    """Draws images once, and again when their files change."""

    def __init__(self) -> None:
        self._cache: OrderedDict[str, tuple[FileStamp, Any]] = OrderedDict()
        self._lock = threading.Lock()  # matplotlib is not thread-safe

    def partition(self, run: RunFollower) -> bytes | None:
        """Return examples per client and class as an SVG; None if there is nothing to draw."""
        svg: bytes | None = self._cached(run, "federation.safetensors", _partition)
        return svg

    def generated(self, run: RunFollower, round: int) -> dict[str, Any] | None:
        """Return the generated images of a round.

        Args:
            run: The run.
            round: The round, from 1.

        Returns:
            The class names, and a strip of images for each recorded step; None if there are none.
        """
        file = f"exhibits/{round:05d}.safetensors"
        images: dict[str, Any] | None = self._cached(run, file, _generated)
        return images

    def _cached(self, run: RunFollower, name: str, draw: Callable[[RunFollower, str], Any]) -> Any:
        stamp = stamp_of(run.path / name)
        key = f"{run.path}/{name}"
        if stamp is None or stamp.size > MAX_FILE_BYTES:
            return None
        with self._lock:
            if key not in self._cache or self._cache[key][0] != stamp:
                try:
                    image = draw(run, name)
                except DRAWING_ERRORS:
                    image = None
                self._cache[key] = (stamp, image)
                if len(self._cache) > MAX_CACHED_IMAGES:
                    self._cache.popitem(last=False)
            return self._cache[key][1]


def _class_names(about: dict[str, Any]) -> list[str]:
    classes = about.get("classes")
    return [printable(str(name)) for name in classes] if isinstance(classes, list) else []


def _partition(run: RunFollower, name: str) -> bytes | None:
    from fedcog.report import partition_figure  # imported here: it loads matplotlib

    tensors, about = run.directory.tensors(name)
    counts = tensors["counts"]
    is_drawable = counts.dim() == 2 and 0 < counts.numel() <= MAX_PARTITION_CELLS
    if not is_drawable or not int(counts.sum()):
        return None
    classes = _class_names(about)[: counts.shape[1]]
    classes += [str(label) for label in range(len(classes), counts.shape[1])]
    noun = "labels" if about.get("several") else "examples"
    names = run.directory.client_names(len(counts))
    return partition_figure(counts, classes, noun, names).encode()


def _generated(run: RunFollower, name: str) -> dict[str, Any] | None:
    tensors, _ = run.directory.tensors(name)
    images = tensors["images"]
    labels = tensors["labels"]
    steps = tensors["steps"].tolist()
    are_images = images.dim() == 5 and images.dtype == torch.uint8 and images.numel() > 0
    if not are_images or max(images.shape[3:]) > MAX_IMAGE_SIDE:
        return None
    try:
        classes = _class_names(run.directory.tensors("federation.safetensors")[1])
    except RecordError:
        classes = []
    names = [_target_name(row, classes) for row in labels[:MAX_COLUMNS]]
    strips = [
        {"step": int(steps[row]), "picture": _strip(images[row, :MAX_COLUMNS])}
        for row in _shown_rows(len(images))
    ]
    return {
        "names": names,
        "width": len(names),
        "small": max(images.shape[3:]) < PIXELATED_BELOW,
        "rows": strips,
    }


def _target_name(target: Tensor, classes: list[str]) -> str:
    """The class of a scalar target, or the classes of a multi-label one."""
    labels = target.nonzero()[:, 0].tolist() if target.dim() == 1 else [int(target)]
    return " + ".join(classes[label] if label < len(classes) else str(label) for label in labels)


def _shown_rows(num_rows: int) -> list[int]:
    """All rows, or `MAX_ROWS` evenly spaced ones with the first and the last."""
    if num_rows <= MAX_ROWS:
        return list(range(num_rows))
    return sorted({round(row * (num_rows - 1) / (MAX_ROWS - 1)) for row in range(MAX_ROWS)})


def _strip(images: Tensor) -> str:
    """Join images (N, C, H, W) side by side into one image, as a data URL."""
    from fedcog.report.image_section import png  # imported here: it loads Pillow

    colors = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    opaque = torch.cat([colors, torch.full_like(colors[:, :1], 255)], dim=1)
    padded = functional.pad(opaque, (0, max(1, opaque.shape[3] // 16)))
    content = png(torch.cat(list(padded), dim=2))
    return "data:image/png;base64," + base64.b64encode(content).decode()
