"""What a client keeps at its node, in its memory and on its disk."""

from pathlib import Path

import pytest
import torch

from fedcog import tree
from fedcog.federation.keepsakes import Keepsake
from fedcog.federation.payloads import Unfit
from fedcog.tree import State

NEW: State = {"control": {"w": torch.zeros(2)}, "empty": {}}


def state(value: float) -> State:
    return {"control": {"w": torch.full((2,), float(value))}, "empty": {}}


def test_a_round_may_be_asked_for_again_but_none_before_it(tmp_path: Path) -> None:
    one = Keepsake(tmp_path, "abc", 3)
    assert torch.equal(one.before(0, NEW)["control"]["w"], torch.zeros(2))
    known = tree.flatten(one.keep(4, state(1), state(2)))
    for again in (Keepsake(tmp_path, "abc", 3), Keepsake(None, "", 3)):
        again.given(known)
        assert float(again.before(5, NEW)["control"]["w"][0]) == 2
        assert float(again.before(9, NEW)["control"]["w"][0]) == 2
        assert float(again.before(4, NEW)["control"]["w"][0]) == 1
        with pytest.raises(Unfit, match="cannot go back to 4"):
            again.before(3, NEW)


def test_it_outlives_what_flower_remembers_and_belongs_to_one_run_and_client(tmp_path: Path) -> None:
    Keepsake(str(tmp_path / "state"), "abc", 3).keep(0, NEW, state(5))
    assert float(Keepsake(str(tmp_path / "state"), "abc", 3).before(1, NEW)["control"]["w"][0]) == 5
    for other in (Keepsake(str(tmp_path / "state"), "abd", 3), Keepsake(str(tmp_path / "state"), "abc", 4)):
        assert float(other.before(1, NEW)["control"]["w"][0]) == 0
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["abc-3.kept"]


def test_a_damaged_file_and_another_form_are_named(tmp_path: Path) -> None:
    Keepsake(tmp_path, "abc", 0).keep(0, NEW, state(5))
    with pytest.raises(Unfit, match=r"'control::w' is torch\.float32"):
        Keepsake(tmp_path, "abc", 0).before(1, {"control": {"w": torch.zeros(3)}})
    (tmp_path / "abc-0.kept").write_bytes(b"nonsense")
    with pytest.raises(Unfit, match=r"abc-0\.kept.* is damaged"):
        Keepsake(tmp_path, "abc", 0).before(1, NEW)


def test_who_answers_once_does_so_once_though_it_keeps_nothing(tmp_path: Path) -> None:
    Keepsake(tmp_path, "abc", 0, once=True).keep(4, {}, {})
    assert Keepsake(tmp_path, "abc", 0, once=True).before(5, {}) == {}
    for round in (4, 0):
        with pytest.raises(Unfit, match="has answered in round 5 already"):
            Keepsake(tmp_path, "abc", 0, once=True).before(round, {})


def test_a_server_cannot_choose_where_it_lies(tmp_path: Path) -> None:
    Keepsake(tmp_path / "state", "../../evil", 0).keep(0, NEW, state(5))
    assert list(tmp_path.rglob("*")) == []
