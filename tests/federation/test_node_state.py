"""Tests of `NodeState`: client states in the memory and on the disk of a node."""

from pathlib import Path

import pytest
import torch

from fedcog.core import tree
from fedcog.core.tree import State
from fedcog.engine.aggregation import InvalidPayload
from fedcog.federation.node_state import NodeState

INITIAL: State = {"control": {"w": torch.zeros(2)}, "empty": {}}


def state(value: float) -> State:
    return {"control": {"w": torch.full((2,), float(value))}, "empty": {}}


def test_last_round_may_be_repeated_but_no_earlier_one(tmp_path: Path) -> None:
    node = NodeState(tmp_path, "abc", 3)
    assert torch.equal(node.before_round(0, INITIAL)["control"]["w"], torch.zeros(2))
    stored = tree.flatten(node.save(4, state(1), state(2)))
    for restored in (NodeState(tmp_path, "abc", 3), NodeState(None, "", 3)):
        restored.restore(stored)
        assert float(restored.before_round(5, INITIAL)["control"]["w"][0]) == 2
        assert float(restored.before_round(9, INITIAL)["control"]["w"][0]) == 2
        assert float(restored.before_round(4, INITIAL)["control"]["w"][0]) == 1
        with pytest.raises(InvalidPayload, match="cannot return to round 4"):
            restored.before_round(3, INITIAL)


def test_state_is_stored_per_run_and_client(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "state"
    NodeState(str(folder), "abc", 3).save(0, INITIAL, state(5))
    same_client = NodeState(str(folder), "abc", 3)
    assert float(same_client.before_round(1, INITIAL)["control"]["w"][0]) == 5
    other_run = NodeState(str(folder), "abd", 3)
    other_client = NodeState(str(folder), "abc", 4)
    for node in (other_run, other_client):
        assert float(node.before_round(1, INITIAL)["control"]["w"][0]) == 0
    assert [file.name for file in folder.iterdir()] == ["abc-3.kept"]


def test_damaged_file_and_wrong_shape_are_errors(tmp_path: Path) -> None:
    NodeState(tmp_path, "abc", 0).save(0, INITIAL, state(5))
    with pytest.raises(InvalidPayload, match=r"'control::w' is torch\.float32"):
        NodeState(tmp_path, "abc", 0).before_round(1, {"control": {"w": torch.zeros(3)}})
    (tmp_path / "abc-0.kept").write_bytes(b"nonsense")
    with pytest.raises(InvalidPayload, match=r"abc-0\.kept.* is damaged"):
        NodeState(tmp_path, "abc", 0).before_round(1, INITIAL)


def test_answers_once_refuses_a_repeated_round_without_state(tmp_path: Path) -> None:
    NodeState(tmp_path, "abc", 0, answers_once=True).save(4, {}, {})
    assert NodeState(tmp_path, "abc", 0, answers_once=True).before_round(5, {}) == {}
    for round in (4, 0):
        with pytest.raises(InvalidPayload, match="already answered in round 5"):
            NodeState(tmp_path, "abc", 0, answers_once=True).before_round(round, {})


def test_server_cannot_choose_the_storage_path(tmp_path: Path) -> None:
    NodeState(tmp_path / "state", "../../evil", 0).save(0, INITIAL, state(5))
    assert list(tmp_path.rglob("*")) == []
