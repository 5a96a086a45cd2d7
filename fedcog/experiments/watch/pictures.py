"""The pictures that a page shows of a run: who holds what, and what was generated in a round."""

import base64
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedcog.experiments.record import RecordError
from fedcog.experiments.report.markup import printable
from fedcog.experiments.watch.following import Followed, Stamp, stamped

LARGEST = 256 * 2**20  # bytes of a file that is opened
CELLS = 200_000  # clients times classes that are drawn
COLUMNS, ROWS, SIDE = 12, 8, 512  # pictures side by side and below each other, and the pixels of one
KEPT = 200  # pictures that are remembered


class Pictures:
    """Pictures drawn once, and again when their files change."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Stamp, Any]] = OrderedDict()
        self._lock = threading.Lock()  # matplotlib draws for one at a time

    def partition(self, run: Followed) -> bytes | None:
        """Examples per client and class as an SVG; None where nothing is recorded that could be drawn."""
        return self._made(run, "federation.safetensors", _partition)  # type: ignore[no-any-return]

    def generated(self, run: Followed, round: int) -> dict[str, Any] | None:
        """The pictures of a round, a strip for every mark on their way, and what each was to show."""
        return self._made(run, f"exhibits/{round:05d}.safetensors", _generated)  # type: ignore[no-any-return]

    def _made(self, run: Followed, name: str, draw: Callable[[Followed, str], Any]) -> Any:
        stamp, key = stamped(run.path / name), f"{run.path}/{name}"
        if stamp is None or stamp[1] > LARGEST:
            return None
        with self._lock:
            if self._kept.get(key, (None,))[0] != stamp:
                try:
                    self._kept[key] = stamp, draw(run, name)
                except (RecordError, LookupError, ArithmeticError, ValueError, TypeError, RuntimeError):  # any content
                    self._kept[key] = stamp, None
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key][1]


def _classes(about: dict[str, Any]) -> list[str]:
    known = about.get("classes")
    return [printable(str(name)) for name in known] if isinstance(known, list) else []


def _partition(run: Followed, name: str) -> bytes | None:
    from fedcog.experiments.report import partition_figure  # draws: loads matplotlib

    tensors, about = run.directory.tensors(name)
    counts = tensors["counts"]
    if counts.dim() != 2 or not 0 < counts.numel() <= CELLS or not int(counts.sum()):
        return None
    names = _classes(about)[: counts.shape[1]]
    names += [str(label) for label in range(len(names), counts.shape[1])]
    return partition_figure(counts, names, "labels" if about.get("several") else "examples").encode()


def _generated(run: Followed, name: str) -> dict[str, Any] | None:
    from fedcog.experiments.report.pictures import png  # loads Pillow

    shown, _ = run.directory.tensors(name)
    images, labels, steps = shown["images"], shown["labels"], shown["steps"].tolist()
    if images.dim() != 5 or images.dtype != torch.uint8 or not images.numel() or max(images.shape[3:]) > SIDE:
        return None
    try:
        known = _classes(run.directory.tensors("federation.safetensors")[1])
    except RecordError:
        known = []
    asked = [row.nonzero()[:, 0].tolist() if labels.dim() == 2 else [int(row)] for row in labels[:COLUMNS]]
    names = [" + ".join(known[one] if one < len(known) else str(one) for one in own) for own in asked]
    chosen = sorted({round(n * (len(images) - 1) / (ROWS - 1)) for n in range(ROWS)}) if len(images) > ROWS else None
    rows = chosen or range(len(images))
    strips = [{"step": int(steps[row]), "picture": _strip(images[row, :COLUMNS], png)} for row in rows]
    return {"names": names, "width": len(names), "small": max(images.shape[3:]) < 64, "rows": strips}


def _strip(images: Tensor, png: Callable[[Tensor], bytes]) -> str:
    """Pictures side by side with nothing between them, as one in the page."""
    colours = images[:, :3] if images.shape[1] >= 3 else images[:, :1].expand(-1, 3, -1, -1)
    solid = torch.cat([colours, torch.full_like(colours[:, :1], 255)], dim=1)
    apart = functional.pad(solid, (0, max(1, solid.shape[3] // 16)))
    return "data:image/png;base64," + base64.b64encode(png(torch.cat(list(apart), dim=2))).decode()
