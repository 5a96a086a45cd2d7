"""Evaluation at Flower nodes: the simulator's numbers, masked sums, and hostile answers."""
# ruff: noqa: E402

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import flower_engine
from tests.support.flower_engine import in_process_flower  # noqa: F401 - a fixture

pytest.importorskip("flwr")
flower_engine.skip_without_ray()

from flwr.app import Message, RecordDict

import fedcog
from fedcog.core import tree
from fedcog.core.tasks import make_task
from fedcog.data.datasets import DataWarning
from fedcog.engine.aggregation import InvalidPayload
from fedcog.federation import flower_messages
from fedcog.federation.backend import ClientEvaluation, NoAnswer
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.setup import ExperimentSetup

SMALL = Experiment(
    algorithm=make_algorithm("fedavg+ditto", {}),
    rounds=2,
    clients=4,
    local_steps=3,
    batch_size=8,
    lr=0.1,
    mapping="loop",
    threads=1,
    device="cpu",
    local_test=0.25,
    metrics="ece, class_accuracy",
)


def tables(experiment: Experiment, path: Path) -> list[dict[str, Any]]:
    run = fedcog.run(experiment, path, report=False)
    return [line["local_test"] for line in run.lines]


@pytest.mark.usefixtures("in_process_flower")
def test_nodes_report_what_the_simulator_computes(tmp_path: Path) -> None:
    simulated = tables(SMALL, tmp_path / "simulated")
    remote = tables(replace(SMALL, backend="flower"), tmp_path / "flower")
    for expected, found in zip(simulated, remote, strict=True):
        assert found.pop("ece") == pytest.approx(expected.pop("ece"), abs=1e-6)
        assert found == expected
        assert "personal_accuracy" in found["clients"]


@pytest.mark.usefixtures("in_process_flower")
def test_masked_sums_reveal_the_same_scores_and_no_client(tmp_path: Path) -> None:
    simulated = tables(SMALL, tmp_path / "simulated")
    masked = tables(replace(SMALL, secure_aggregation=True), tmp_path / "masked")
    for expected, found in zip(simulated, masked, strict=True):
        assert "clients" not in found and "accuracy_worst" not in found
        assert found.pop("num_clients") == 4
        for name, value in found.items():
            assert value == pytest.approx(expected[name], abs=1e-4), name


def evaluation() -> ClientEvaluation:
    return ClientEvaluation(
        client_ids=[0],
        class_counts=torch.tensor([[3, 2]]),
        num_examples=torch.tensor([5]),
        class_stats={"global": torch.tensor([[2, 2]])},
    )


def answer(**changes: Any) -> Any:
    state = flower_messages.evaluation_state(evaluation()) | changes
    request = Message(RecordDict(), dst_node_id=1, message_type="evaluate")
    record = flower_messages.to_array_record(state)
    return Message(RecordDict({flower_messages.ANSWER_RECORD: record}), reply_to=request)


def test_impossible_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):  # as in a run: messages have these numbers
        monkeypatch.setattr(TaskIdentity, name, 1)
    template = flower_messages.evaluation_state(evaluation())
    task = make_task(2, multi_label=False)
    found = flower_messages.read_evaluation(answer(), template, task)
    assert int(found["num_examples"]) == 5
    hostile: list[dict[str, Any]] = [
        {"num_examples": torch.tensor(-1)},
        {"num_examples": torch.tensor(6)},
        {"num_examples": torch.tensor(2**40), "class_counts": torch.tensor([2**40, 0])},
        {"class_counts": torch.tensor([-3, 8])},
        {"class_stats": {"global": torch.tensor([3, 3])}},
        {"class_stats": {"global": torch.tensor([-1, 2])}},
        {"class_stats": {"global": torch.tensor([2.0, 2.0])}},
        {"class_stats": {"global": torch.zeros(100_000, dtype=torch.int64)}},
        {"more": torch.tensor(1)},
    ]
    for changes in hostile:
        with pytest.raises(InvalidPayload):
            flower_messages.read_evaluation(answer(**changes), template, task)


def test_masked_counts_add_up() -> None:
    task = make_task(2, multi_label=False)
    first = flower_messages.masked_counts(evaluation(), task)
    nothing = evaluation()._replace(
        class_counts=torch.zeros(1, 2, dtype=torch.int64),
        num_examples=torch.zeros(1, dtype=torch.int64),
        class_stats={"global": torch.zeros(1, 2, dtype=torch.int64)},
    )
    empty = flower_messages.masked_counts(nothing, task)
    assert float(first["count"]) == 1 and float(first["scores"]["global"]) == pytest.approx(0.8)
    assert float(empty["count"]) == 0 and float(empty["scores"]["global"]) == 0


def test_sums_over_too_few_clients_with_test_examples_are_not_used() -> None:
    task = make_task(2, multi_label=False)
    one = flower_messages.masked_counts(evaluation(), task)

    def total(number: int) -> Any:
        return tree.apply(lambda value: value.double() * number, one)

    assert flower_messages.summed_evaluation(total(3), [0, 1, 2, 3]).num_summed == 3
    with pytest.raises(NoAnswer, match="2 of them have test examples"):
        flower_messages.summed_evaluation(total(2), [0, 1, 2, 3])


def test_own_metrics_are_said_to_be_unknown_to_nodes() -> None:
    remote = replace(SMALL, backend="flower")
    with pytest.warns(DataWarning, match="on the server's test set only"):
        ExperimentSetup(remote, UserObjects(metrics={"zero": lambda logits, labels: 0.0}))
