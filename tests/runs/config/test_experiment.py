"""Tests of experiments: TOML, validation of settings, and identity."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fedcog import FedAvg, FedCOG, FedProx, make_algorithm
from fedcog.core.settings import ConfigError
from fedcog.core.settings import settings as settings_of
from fedcog.core.toml import read_toml
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment, read_experiment

EXPERIMENT = Experiment(
    algorithm=FedCOG(FedProx(mu=0.3), count=7, source="noise"),
    dataset="cifar10",
    data_dir='a "quoted" \\ folder\n',
    beta=1e-7,
    balance=False,
    seed=2**40,
)


def config_faults(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_experiment(values)
    return caught.value.faults


def test_experiment_survives_toml(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(EXPERIMENT.to_toml())
    assert read_experiment(read_toml(tmp_path / "one.toml")) == EXPERIMENT


@settings(max_examples=50)
@given(st.data())
def test_any_settings_survive_toml(data: st.DataObject) -> None:
    changes: dict[str, Any] = {}
    for setting in data.draw(
        st.lists(st.sampled_from(list(settings_of(Experiment).values())), max_size=5)
    ):
        if setting.choices:
            changes[setting.name] = data.draw(st.sampled_from(setting.choices))
        elif setting.type is bool:
            changes[setting.name] = data.draw(st.booleans())
        elif setting.name == "data_dir":
            changes[setting.name] = data.draw(st.text(st.characters(codec="utf-8")))
    try:
        experiment = dataclasses.replace(Experiment(), **changes)
    except ConfigError:  # some settings exclude each other
        reject()
    assert read_experiment(tomllib.loads(experiment.to_toml())) == experiment


def test_composed_algorithms_are_named_inner_first() -> None:
    assert algorithm_name(EXPERIMENT.algorithm) == "fedprox+fedcog"
    assert make_algorithm("fedprox+fedcog", {"fedprox": {"mu": 0.3}}) == FedCOG(FedProx(mu=0.3))
    assert make_algorithm("fedcog") == FedCOG(FedAvg())


def test_all_faults_are_reported_at_once() -> None:
    faults = config_faults(
        {
            "clents": 3,
            "rounds": 0,
            "lr": "fast",
            "participation": 1.5,
            "partition": "alphabetical",
            "balance": 1,
            "dataset": "cifar11",
            "model": "gpt",
            "algorithm": "fedprox+fedcog",
            "fedprox": {"mu": -1.0, "nu": 2},
            "fedcog": {"source": "magic"},
        }
    )
    messages = [
        "unknown setting 'clents': did you mean clients?",
        "rounds needs an integer >= 1, not 0.",
        "lr needs a number > 0, not 'fast'.",
        "participation needs a number > 0 and <= 1, not 1.5.",
        "partition needs one of auto, iid, dirichlet",
        "balance needs true or false, not 1.",
        "fedprox.mu needs a number >= 0, not -1.0.",
        "unknown setting 'fedprox.nu'",
        "fedcog.source needs one of global+local, global, noise, nothing, not 'magic'.",
        "unknown data set 'cifar11': did you mean cifar10 or cifar100?",
        "unknown model 'gpt': choose one of auto, cnn, cnn3, small, mlp, resnet18, resnet18-gn, "
        "torchvision:NAME, timm:NAME.",
    ]
    for message in messages:
        assert any(message in fault for fault in faults), message
    assert len(faults) == len(messages)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"algorithm": "fedmagic"}, "unknown algorithm 'fedmagic'"),
        (
            {"algorithm": "fedcog+fedprox"},
            "'fedprox' is not a wrapper, so it must come first: write fedprox+",
        ),
        ({"algorithm": 3}, "algorithm needs text"),
        ({"fedprox": {"mu": -1.0}}, "fedprox.mu needs a number"),
        ({"algorithm": "fedcog", "fedcog": True}, "write fedcog.SETTING, or a table"),
        ({"fedprox": 3}, "write fedprox.SETTING, or a table"),
        ({"lr": float("nan")}, "lr needs a number > 0, not nan"),
        ({"seed": -1}, "seed needs an integer >= 0"),
        ({"rounds": True}, "rounds needs an integer"),
        ({"rounds": 2.0}, "rounds needs an integer"),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, Any], reason: str) -> None:
    assert any(reason in fault for fault in config_faults(values))


def test_integers_are_accepted_as_floats() -> None:
    assert read_experiment({"lr": 1}).lr == 1.0


def test_experiment_constructor_validates_settings() -> None:
    with pytest.raises(ConfigError, match="clients needs an integer >= 0, not -1"):
        Experiment(clients=-1)
    with pytest.raises(ConfigError, match=r"fedprox\.mu needs"):
        Experiment(algorithm=FedProx(mu=float("inf")))


def test_identity_changes_only_with_settings_that_affect_results() -> None:
    base = Experiment()
    assert base.identity == dataclasses.replace(base, rounds=3, device="cpu", data_dir="x").identity
    assert base.identity != dataclasses.replace(base, lr=0.02).identity
    assert base.identity != dataclasses.replace(base, algorithm=FedProx()).identity
    weak = dataclasses.replace(base, algorithm=FedProx(mu=0.1))
    strong = dataclasses.replace(base, algorithm=FedProx(mu=0.2))
    assert weak.identity != strong.identity


def test_identities_of_recorded_runs_never_change() -> None:
    """Checkpoints hold these digests: a setting that is added later must not change them."""
    base = Experiment(partition="dirichlet", clients=10)
    assert base.identity == "58c6dfde6aa83a7d"
    other = dataclasses.replace(base, algorithm=FedCOG(FedProx()), lr=0.02)
    assert other.identity == "179ebbdcf1c487e1"


def test_every_setting_has_help_and_defaults_are_valid() -> None:
    for setting in settings_of(Experiment).values():
        assert setting.help, setting.name
    Experiment()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"lr = ", "is not a TOML file"), (b"\xff\xfe", "is not a TOML file"), (None, "cannot read")],
)
def test_unreadable_toml_files_are_errors(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_toml(tmp_path / "x.toml")
