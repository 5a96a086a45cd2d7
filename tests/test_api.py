"""Calls of `fedcog.run`, `compare` and `sweep` as users make them."""

from pathlib import Path
from typing import Any

import pytest

import fedcog
from fedcog import Experiment

EXPERIMENT = Experiment(rounds=1, local_steps=1, threads=1)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modle", "Did you mean 'model'?"),
        ("callback", "Did you mean 'callbacks'?"),
        ("zzz", "It accepts data, model, generator, augmentation, callbacks"),
    ],
)
def test_run_refuses_unknown_keywords(name: str, hint: str, tmp_path: Path) -> None:
    keywords: dict[str, Any] = {name: None}
    with pytest.raises(TypeError) as error:
        fedcog.run(EXPERIMENT, tmp_path / "run", **keywords)
    assert f"run() got an unexpected keyword argument {name!r}. {hint}" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_compare_and_sweep_refuse_what_only_run_accepts(tmp_path: Path) -> None:
    resume: dict[str, Any] = {"resume": True}
    track: dict[str, Any] = {"track": "tensorboard"}
    with pytest.raises(TypeError, match=r"compare\(\) got an unexpected keyword argument 'resume'"):
        fedcog.compare([EXPERIMENT], [0], tmp_path / "runs", **resume)
    with pytest.raises(TypeError, match=r"sweep\(\) got an unexpected keyword argument 'track'"):
        fedcog.sweep([EXPERIMENT], {"lr": [0.1]}, tmp_path / "sweep", trials=1, **track)
