"""Timing of the parts of a round by the clock of the device that computes them."""

import itertools
import time
from collections.abc import Sequence

import torch


class Stopwatch:
    """Measures seconds per part. On a GPU it records events and does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = [("", self._now(device))]

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`."""
        self._marks.append((part, self._now(self._device)))

    def seconds(self) -> dict[str, float]:
        """Return seconds by part, in order. This waits until the device has finished."""
        return {
            part: _seconds_between(before, after)
            for (_, before), (part, after) in itertools.pairwise(self._marks)
        }

    @staticmethod
    def _now(device: torch.device) -> "float | torch.cuda.Event":
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event


def _seconds_between(
    before: "float | torch.cuda.Event", after: "float | torch.cuda.Event"
) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3
    return float(after) - float(before)  # type: ignore[arg-type]


class Timings:
    """Seconds per part, known or still to be read from stopwatches."""

    def __init__(
        self,
        known: dict[str, float] | None = None,
        stopwatches: Sequence[Stopwatch] = (),
        divisor: int = 1,
    ) -> None:
        """Create timings.

        Args:
            known: Seconds by part that are already known.
            stopwatches: Stopwatches whose seconds are added to them.
            divisor: Number of runs that share the stopwatches' time.
        """
        self._known = known or {}
        self._stopwatches = tuple(stopwatches)
        self._divisor = divisor

    def seconds(self) -> dict[str, float]:
        """Return seconds by part. This waits until the device has finished."""
        total = dict(self._known)
        for stopwatch in self._stopwatches:
            for part, value in stopwatch.seconds().items():
                total[part] = total.get(part, 0.0) + value / self._divisor
        return total

    @staticmethod
    def concatenate(parts: "Sequence[Timings]") -> "Timings":
        """Add up the timings of consecutive parts."""
        if len(parts) == 1:
            return parts[0]
        return _SumOfTimings(parts)


class _SumOfTimings(Timings):
    """The sum of several timings, read when asked for."""

    def __init__(self, parts: Sequence[Timings]) -> None:
        super().__init__()
        self._parts = parts

    def seconds(self) -> dict[str, float]:
        """Return the sum over all parts."""
        total: dict[str, float] = {}
        for part in self._parts:
            for name, value in part.seconds().items():
                total[name] = total.get(name, 0.0) + value
        return total
