"""What takes how long, by the clock of the device that does it."""

import time

import torch


class Clock:
    """Seconds by part, by the device's own clock: nobody waits for them until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, [("", self._now(device))]

    def lap(self, part: str) -> None:
        """What was done since the last lap is `part`."""
        self._marks.append((part, self._now(self._device)))

    def seconds(self) -> dict[str, float]:
        """By part, in order."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {part: _between(before, after) for (_, before), (part, after) in pairs}

    @staticmethod
    def _now(device: torch.device) -> "float | torch.cuda.Event":
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event


def _between(before: "float | torch.cuda.Event", after: "float | torch.cuda.Event") -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3
    return float(after) - float(before)  # type: ignore[arg-type]
