"""Answers that wait: what clients have computed and the server has not aggregated yet."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from fedcog.core import tree
from fedcog.core.tree import Params, State


class Answer(NamedTuple):
    """The answer of one client, from the moment at which the client starts.

    Attributes:
        client_id: The client.
        version: Number of server updates before the client started.
        finish: When the answer arrives, in virtual seconds since the start of the run.
        payload: What the client sends.
        state: What the client keeps; empty after the arrival.
        findings: Its row of `ClientFindings`, as far as training decides it, in host memory.
        stats_before: Class statistics of the global model that it started from, if its local model
            was evaluated.
        artifacts: Its artifacts, if it is the first client of its cohort.
    """

    client_id: int
    version: int
    finish: Fraction
    payload: State
    state: State
    findings: Params
    stats_before: Params
    artifacts: Params

    @property
    def update_finite(self) -> bool:
        """Whether the payload is finite."""
        return bool(self.findings["update_finite"])

    @property
    def all_finite(self) -> bool:
        """Whether payload and state are finite."""
        return bool(self.findings["all_finite"])

    @property
    def tensors(self) -> State:
        """All tensors of the answer."""
        return {name: value for name, value in self._asdict().items() if name not in _NUMBERS}


_NUMBERS = ("client_id", "version", "finish")


class VirtualState(NamedTuple):
    """Virtual time after a round, and the answers that wait: what a checkpoint holds of them.

    Attributes:
        now: Virtual seconds since the start of the run.
        in_flight: Answers of clients that are training.
        buffer: Answers that have arrived, in order.
    """

    now: Fraction
    in_flight: Sequence[Answer] = ()
    buffer: Sequence[Answer] = ()

    def to_tensors(self) -> Params:
        """Return all tensors, flat; names start with the number of the answer."""
        answers = [*self.in_flight, *self.buffer]
        return tree.flatten({str(index): one.tensors for index, one in enumerate(answers)})

    def to_info(self) -> dict[str, Any]:
        """Return everything but the tensors, for JSON."""
        return {
            "now": str(self.now),
            "in_flight": [_answer_info(answer) for answer in self.in_flight],
            "buffer": [_answer_info(answer) for answer in self.buffer],
        }

    @classmethod
    def from_record(cls, tensors: Params, info: Mapping[str, Any]) -> "VirtualState":
        """Restore the state from a checkpoint.

        Args:
            tensors: Result of `to_tensors`.
            info: Result of `to_info`.

        Returns:
            The state.

        Raises:
            ArithmeticError, AttributeError, KeyError, TypeError, ValueError: If they are damaged.
        """
        by_answer = tree.unflatten(tensors)
        num_in_flight = len(info["in_flight"])
        answers = [
            _read_answer(by_answer[str(index)], own)
            for index, own in enumerate([*info["in_flight"], *info["buffer"]])
        ]
        now = Fraction(str(info["now"]))
        return cls(now, answers[:num_in_flight], answers[num_in_flight:])


def _answer_info(answer: Answer) -> dict[str, Any]:
    return {
        "client": answer.client_id,
        "version": answer.version,
        "finish": str(answer.finish),
        "empty": _empty_paths(answer.tensors),
    }


def _read_answer(tensors: State, info: Mapping[str, Any]) -> Answer:
    """Restore one answer; unlike tensors, empty dicts leave no trace in a flat dict."""
    for path in info["empty"]:
        *parents, name = path.split("::")
        place = tensors
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = {}
    return Answer(
        client_id=int(info["client"]),
        version=int(info["version"]),
        finish=Fraction(str(info["finish"])),
        **tensors,
    )


def _empty_paths(state: State, prefix: str = "") -> list[str]:
    """Return the paths of all empty dicts in a state."""
    paths = []
    for name, value in state.items():
        if isinstance(value, dict):
            paths += _empty_paths(value, f"{prefix}{name}::") if value else [f"{prefix}{name}"]
    return paths
