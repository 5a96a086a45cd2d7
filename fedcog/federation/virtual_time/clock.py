"""The virtual clock of a run: how long clients take, and what is on its way."""

from collections.abc import Sequence
from fractions import Fraction

import torch

from fedcog.core import tree
from fedcog.federation.device_types import DeviceType
from fedcog.federation.virtual_time.answers import Answer, VirtualState


def client_durations(
    num_steps: Sequence[int], device_types: Sequence[DeviceType]
) -> list[Fraction]:
    """Return how many virtual seconds each client takes for a round: local steps / speed.

    Times are fractions, so that clients that finish together do so exactly.

    Args:
        num_steps: Number of local steps of each client.
        device_types: Types of devices, first those of the first clients; empty: all have speed 1.

    Returns:
        Virtual seconds by client.
    """
    speeds = [
        Fraction(1) if device.speed is None else Fraction(str(device.speed))
        for device in device_types
        for _ in range(device.num_clients)
    ]
    speeds = speeds or [Fraction(1)] * len(num_steps)
    return [steps / speed for steps, speed in zip(num_steps, speeds, strict=True)]


class VirtualClock:
    """Virtual time of a run.

    Attributes:
        durations: Virtual seconds that each client takes for a round.
        now: Virtual seconds since the start of the run.
        in_flight: Answers of clients that are training; only in asynchronous rounds.
        buffer: Answers that have arrived and are not aggregated, in order of arrival.
    """

    def __init__(self, durations: Sequence[Fraction]) -> None:
        self.durations = durations
        self.now = Fraction(0)
        self.in_flight: list[Answer] = []
        self.buffer: list[Answer] = []

    def wait_for(self, client_ids: Sequence[int]) -> None:
        """Let a synchronous round pass: it lasts as long as its slowest client."""
        self.now += max(self.durations[client_id] for client_id in client_ids)

    def next_arrivals(self) -> list[Answer]:
        """Advance to the next arrival, and move what arrives then into the buffer.

        The buffer does not hold states: a client has its new state from the arrival on.

        Returns:
            The answers that arrive at that moment, with states, by client id.
        """
        self.now = min(answer.finish for answer in self.in_flight)
        arrived = [answer for answer in self.in_flight if answer.finish == self.now]
        arrived.sort(key=lambda answer: answer.client_id)
        self.in_flight = [answer for answer in self.in_flight if answer.finish > self.now]
        self.buffer += [answer._replace(state={}) for answer in arrived]
        return arrived

    def take(self, count: int) -> list[Answer]:
        """Remove the first answers from the buffer and return them."""
        taken = self.buffer[:count]
        self.buffer = self.buffer[count:]
        return taken

    def snapshot(self) -> VirtualState:
        """Return what a checkpoint holds; later changes leave it as it is."""
        return VirtualState(self.now, tuple(self.in_flight), tuple(self.buffer))

    def restore(self, state: VirtualState, device: torch.device) -> None:
        """Continue from a snapshot.

        Args:
            state: The snapshot.
            device: Where clients train.
        """
        self.now = state.now
        self.in_flight = [_on_device(answer, device) for answer in state.in_flight]
        self.buffer = [_on_device(answer, device) for answer in state.buffer]


def _on_device(answer: Answer, device: torch.device) -> Answer:
    """Move a payload to a device; states move when their client trains."""
    return answer._replace(payload=tree.to(answer.payload, device))
