"""Messages between the Flower server and its nodes, and the checks of what arrives.

Down go the broadcast and the round. Up come one client's payload and a few statistics or, with
secure aggregation, a masked vector and nothing else. Nothing is unpickled, and every array is
checked against the form that it must have.
"""

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# Flower and Ray read these when they are imported or started: no telemetry, GPUs stay visible to
# nodes, and no idle process is started for each core.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp import Grid

from fedcog.algorithms import Algorithm
from fedcog.core import tree
from fedcog.core.tasks import Task
from fedcog.core.timing import Timings
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import (
    InvalidPayload,
    NotFinite,
    is_finite,
    match_template,
    read_array,
)
from fedcog.engine.cohort_results import CohortResult
from fedcog.federation.backend import ClientEvaluation, NoAnswer
from fedcog.federation.simulator import Simulator

QUERY = "query"
"""Message type that asks a node which partition it holds."""
TRAIN = "train"
"""Message type that asks a node to train."""
EVALUATE = "evaluate"
"""Message type that asks a node to evaluate models on its own test examples."""
BROADCAST_RECORD = "shared"
"""Name of the record with the broadcast. Names on the wire are frozen: recorded traffic has them.
"""
REQUEST_RECORD = "ask"
"""Name of the record with the round's settings."""
ANSWER_RECORD = "found"
"""Name of the record with a client's answer."""
EVALUATE_KEY = "score"
"""Key of the request that says whether to evaluate the local model."""
CLASS_STATS_KEY = "hits"
"""Key of the class statistics in an answer."""
MODEL_RECORD = "model"
"""Name of the record with the weights to evaluate."""
EVALUATE_ONLY_KEY = "evaluate-only"
"""Key of a masked request that asks for an evaluation instead of training."""
RESUM_KEY = "resum"
"""Key of a request for a client's part of a further sum of the round, counted from 1."""
SURVEY_KEY = "survey"
"""Key of a request for a sum over a client's training examples."""
MAX_TEST_EXAMPLES = 2**16
"""Most test examples of a node: masked counts must have a bound."""
MAX_EXTRA_BYTES = 2**16
"""Bytes that an answer may have beyond its tensors, for names and headers."""
MAX_REASON_LENGTH = 500
"""Characters of a node's error that are shown."""


class NodeSetup(NamedTuple):
    """An experiment set up in a process of the federation.

    Attributes:
        simulator: Knows the clients, and trains the one at this node.
        algorithm: The algorithm.
        secure_scale: Factor on the bounds of secure aggregation; 0 sends payloads in clear.
    """

    simulator: Simulator
    algorithm: Algorithm
    secure_scale: float = 0.0


class TrafficMeter:
    """A grid that counts bytes per node and remembers failures.

    Attributes:
        received: Bytes that each node received.
        sent: Bytes that each node sent.
        failures: Why a node's last answer failed.
        unavailable: Nodes that were offline when last asked.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.received: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.unavailable: set[int] = set()
        self._receivers: dict[str, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Return the connected nodes."""
        return self._grid.get_node_ids()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return the replies that arrive in time.

        Args:
            messages: What to send.
            timeout: Seconds to wait; None waits forever.

        Returns:
            The replies.
        """
        messages = list(messages)
        sizes: dict[int, int] = {}
        for message in messages:
            size = sizes.setdefault(id(message.content), num_bytes(message.content))
            node = message.metadata.dst_node_id
            self.received[node] = self.received.get(node, 0) + size
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        for message in messages:
            self._receivers[message.metadata.message_id] = message.metadata.dst_node_id
        for reply in replies:
            self._count_reply(reply)
        return replies

    def sender(self, reply: Message) -> int:
        """Return the node of a reply; for a lost node, the SuperLink replies in its own name."""
        metadata = reply.metadata
        return self._receivers.get(metadata.reply_to_message_id, metadata.src_node_id)

    def _count_reply(self, reply: Message) -> None:
        node = self.sender(reply)
        self.failures.pop(node, None)
        self.unavailable.discard(node)
        if not reply.has_error():
            self.sent[node] = self.sent.get(node, 0) + num_bytes(reply.content)
            return
        self.failures[node] = failure_reason(reply)
        if reply.error.code == ErrorCode.NODE_UNAVAILABLE:
            self.unavailable.add(node)


def to_array_record(state: State) -> ArrayRecord:
    """Convert a state to Flower's record of arrays."""
    flat = tree.flatten(state)
    return ArrayRecord({name: value.detach().cpu().contiguous() for name, value in flat.items()})


def from_array_record(record: ArrayRecord) -> Params:
    """Parse Flower's record of arrays, without unpickling and without trusting sizes."""
    return {name: read_array(array.data) for name, array in record.items()}


def answer_state(result: CohortResult) -> State:
    """Select what a client sends to the server in clear."""
    answer: State = {"total": result.total, "loss": result.loss, "distance": result.distance}
    if result.class_stats is not None:
        answer[CLASS_STATS_KEY] = result.class_stats
    return answer


def read_answer(reply: Message, template: State, evaluate_local: bool) -> State:
    """Check form, size, weight and finiteness of a node's reply, and return its answer.

    Args:
        reply: The reply.
        template: The expected answer, as meta tensors.
        evaluate_local: Whether class statistics are expected.

    Returns:
        The answer, nested like the template.

    Raises:
        InvalidPayload: If the node failed, or its answer has another form or is not finite.
    """
    if reply.has_error():
        raise InvalidPayload(failure_reason(reply))
    return check_answer(reply.content.get(ANSWER_RECORD), template, evaluate_local)


def check_answer(record: Any, template: State, evaluate_local: bool) -> State:
    """Check the arrays of an answer.

    Args:
        record: What the reply holds as its answer.
        template: The expected answer, as meta tensors.
        evaluate_local: Whether class statistics are expected.

    Returns:
        The answer, nested like the template.

    Raises:
        InvalidPayload: If its size, names, shapes, dtypes or weights are not as expected.
        NotFinite: If it contains NaN or infinity.
    """
    template = dict(template)
    class_stats = template.pop("class_stats", None)
    if evaluate_local and class_stats is not None:
        template[CLASS_STATS_KEY] = class_stats
    answer = _check_tensors(record, template)
    weight = float(answer["total"]["weight"])
    count = float(answer["total"].get("count", 1))
    if not 0 < weight <= 1 or count != 1:
        raise InvalidPayload(f"the answer counts as {count:g} clients of weight {weight:g}.")
    return answer


def read_part(reply: Message, template: State) -> State:
    """Check form, size and finiteness of a node's part of a further sum, and return it.

    Args:
        reply: The reply.
        template: The expected part, as meta tensors.

    Returns:
        The part, nested like the template.

    Raises:
        InvalidPayload: If the node failed, or its answer has another form or is not finite.
    """
    if reply.has_error():
        raise InvalidPayload(failure_reason(reply))
    return _check_tensors(reply.content.get(ANSWER_RECORD), template)


def _check_tensors(record: Any, template: State) -> State:
    """Return the arrays of a record, nested like a template, if they are finite and fit it."""
    if not isinstance(record, ArrayRecord):
        raise InvalidPayload(f"the reply holds no arrays named '{ANSWER_RECORD}'.")
    tensors = tree.flatten(template).values()
    max_bytes = sum(value.numel() * value.element_size() for value in tensors) + MAX_EXTRA_BYTES
    if record.count_bytes() > max_bytes:
        raise InvalidPayload(
            f"the answer has {record.count_bytes():,} bytes, more than {max_bytes:,}."
        )
    answer = match_template(template, from_array_record(record))
    if not is_finite(answer):
        raise NotFinite("the answer contains numbers that are not finite.")
    return answer


def answer_result(answer: State) -> CohortResult:
    """Convert a checked answer to the result of a cohort of one client."""
    finite = torch.ones(1, dtype=torch.bool)
    return CohortResult(
        total=answer["total"],
        payloads={},
        loss=answer["loss"],
        distance=answer["distance"],
        class_stats=answer.get(CLASS_STATS_KEY),
        states={},
        artifacts={},
        timings=Timings(),
        update_finite=finite,
        state_finite=finite,
    )


def evaluation_state(evaluation: ClientEvaluation) -> State:
    """Select what a client sends of its evaluation; rows of one client, without the client axis."""
    answer: State = {
        "class_counts": evaluation.class_counts[0],
        "num_examples": evaluation.num_examples[0],
        "class_stats": {name: stats[0] for name, stats in evaluation.class_stats.items()},
    }
    if evaluation.calibration is not None:
        answer["calibration"] = evaluation.calibration[0]
    return answer


COUNT_BOUNDS = {
    "class_counts": float(MAX_TEST_EXAMPLES),
    "num_examples": float(MAX_TEST_EXAMPLES),
    "class_stats": float(MAX_TEST_EXAMPLES),
    "calibration": float(MAX_TEST_EXAMPLES),
    "scores": 1.0,
    "squares": 1.0,
    "count": 1.0,
}
"""Bounds of the parts of a masked evaluation."""
MIN_SUMMED = 3
"""Smallest number of clients whose masked scores are used."""


def masked_counts(evaluation: ClientEvaluation, task: Task) -> State:
    """Return what a client adds to the masked sum of an evaluation.

    Args:
        evaluation: The evaluation of one client.
        task: Computes its scores.

    Returns:
        Counts, its scores and their squares by model, and 1 as the number of clients. All are 0
        for a client without test examples.
    """
    payload = evaluation_state(evaluation)
    has_tests = int(payload["num_examples"]) > 0
    scores = {}
    for name, stats in payload["class_stats"].items():
        score = task.score(stats, payload["class_counts"]) if has_tests else 0.0
        scores[name] = torch.tensor(score, dtype=torch.float64)
    payload["scores"] = scores
    payload["squares"] = {name: score**2 for name, score in scores.items()}
    payload["count"] = torch.tensor(float(has_tests), dtype=torch.float64)
    return payload


def summed_evaluation(total: State, client_ids: list[int]) -> ClientEvaluation:
    """Convert a sum of `masked_counts` to an evaluation with a single row.

    Args:
        total: The sum, in which masking has rounded counts.
        client_ids: The clients in the sum.

    Returns:
        The evaluation.

    Raises:
        NoAnswer: If so few clients have test examples that sums show the scores of single ones.
    """
    num_summed = int(total["count"].round())
    if num_summed < MIN_SUMMED:
        raise NoAnswer(
            f"{num_summed} of them have test examples, and a sum over fewer than {MIN_SUMMED} "
            "shows scores of single clients."
        )
    counts = {name: total[name] for name in ("class_counts", "num_examples", "class_stats")}
    counts = tree.apply(lambda value: value.round().long()[None], counts)
    calibration = total.get("calibration")
    return ClientEvaluation(
        client_ids=client_ids,
        class_counts=counts["class_counts"],
        num_examples=counts["num_examples"],
        class_stats=counts["class_stats"],
        calibration=None if calibration is None else calibration[None],
        score_sums={
            name: (float(score), float(total["squares"][name]))
            for name, score in total["scores"].items()
        },
        num_summed=num_summed,
    )


def read_evaluation(reply: Message, template: State, task: Task) -> State:
    """Check a node's evaluation and return it.

    Args:
        reply: The reply.
        template: The expected answer.
        task: Knows which statistics are possible.

    Returns:
        The answer, nested like the template.

    Raises:
        InvalidPayload: If the node failed, or its numbers cannot be those of an evaluation.
    """
    if reply.has_error():
        raise InvalidPayload(failure_reason(reply))
    record = reply.content.get(ANSWER_RECORD)
    if not isinstance(record, ArrayRecord) or record.count_bytes() > MAX_EXTRA_BYTES + sum(
        value.numel() * value.element_size() for value in tree.flatten(template).values()
    ):
        raise InvalidPayload("the reply holds no evaluation, or one that is too large.")
    answer = match_template(template, from_array_record(record))
    counts = answer["class_counts"]
    number = int(answer["num_examples"])
    limits = task.max_class_stats(counts, number)
    is_valid = (
        0 <= number <= MAX_TEST_EXAMPLES
        and bool(((counts >= 0) & (counts <= number)).all())
        and (task.multi_label or int(counts.sum()) == number)
        and all(
            bool(((stats >= 0) & (stats <= limits)).all())
            for stats in answer["class_stats"].values()
        )
        and is_finite(answer)
    )
    if not is_valid:
        raise InvalidPayload("the reply has counts that no evaluation can have.")
    return answer


def num_bytes(content: RecordDict) -> int:
    """Return the size of a message's content on the wire, in bytes."""
    return int(recorddict_to_proto(content).ByteSize())


def failure_reason(reply: Message) -> str:
    """Return why a node failed, in the words of its exception if there is one."""
    text = str(reply.error.reason)
    raised = re.search(r"<class '[^']*'>:<'(.*)'>", text, re.DOTALL)
    lines = [line.strip() for line in (raised[1] if raised else text).splitlines()]
    lines = [line for line in lines if line]
    if lines and "ray::" in lines[0]:  # a traceback, which ends with the exception
        lines = [lines[-1].partition(": ")[2] or lines[-1]]
    message = " ".join(lines)[:MAX_REASON_LENGTH]
    return f"the node failed: {message or 'it gave no reason.'}"
