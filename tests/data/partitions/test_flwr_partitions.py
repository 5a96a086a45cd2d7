"""Tests that flwr-datasets partitions match its partitioners called directly."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import fedcog
from fedcog import ConfigError, Experiment
from fedcog.cli.main import main
from fedcog.core import rng
from fedcog.data import PartitionError, registry
from fedcog.data.partitions.base import PartitionConfig
from fedcog.data.partitions.flwr_partitions import FLWR_PARTITIONS, describe, parse_arguments
from fedcog.data.partitions.schemes import PARTITIONS, make_partition
from fedcog.runs.config import experiment
from fedcog.runs.setup import split_dataset

DIGITS = registry.load("digits")
LABELS = DIGITS.train_y.numpy()
needs_flwr_datasets = pytest.mark.skipif(
    importlib.util.find_spec("flwr_datasets") is None, reason="needs flwr-datasets"
)

PARTITIONER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "flwr-dirichlet": {
        "num_partitions": 6,
        "alpha": 0.5,
        "min_partition_size": 5,
        "self_balancing": True,
    },
    "flwr-inner-dirichlet": {
        "partition_sizes": [len(part) for part in np.array_split(LABELS, 6)],
        "alpha": 0.5,
    },
    "flwr-pathological": {
        "num_partitions": 6,
        "num_classes_per_partition": 3,
        "class_assignment_mode": "deterministic",
    },
    "flwr-shard": {"num_partitions": 6, "shard_size": 50, "keep_incomplete_shard": True},
    "flwr-iid": {"num_partitions": 6},
    "flwr-linear": {"num_partitions": 6},
    "flwr-square": {"num_partitions": 6},
    "flwr-exponential": {"num_partitions": 6},
}
"""Arguments of each partitioner that correspond to the configuration CONFIG."""
CONFIG = PartitionConfig(clients=6, beta=0.5, classes_per_client=3, min_examples=5)
ARGUMENTS = {
    "flwr-pathological": "class_assignment_mode=deterministic",
    "flwr-shard": "shard_size=50 keep_incomplete_shard=true",
}


def test_every_partition_name_is_a_setting() -> None:
    names = {"auto", *PARTITIONS, "given", *FLWR_PARTITIONS}
    assert set(get_args(experiment.PartitionName)) == names
    assert tuple(FLWR_PARTITIONS) == tuple(PARTITIONER_ARGUMENTS)


@pytest.mark.slow
@needs_flwr_datasets
@pytest.mark.parametrize("kind", FLWR_PARTITIONS)
@pytest.mark.parametrize("seed", [0, 2**40])
def test_partition_matches_flwr_datasets(kind: str, seed: int) -> None:
    from datasets import Dataset
    from flwr_datasets import partitioner

    config = dataclasses.replace(CONFIG, arguments=ARGUMENTS.get(kind, ""))
    shares = make_partition(kind, LABELS, None, config, seed)
    if FLWR_PARTITIONS[kind].by_label:
        order = np.arange(len(LABELS))
        label_arguments = {"partition_by": "label", "seed": seed}
    else:
        order = rng.permutation(seed, "partition/0", 0, len(LABELS)).numpy()
        label_arguments = {}
    expected = getattr(partitioner, FLWR_PARTITIONS[kind].partitioner)(
        **PARTITIONER_ARGUMENTS[kind], **label_arguments
    )
    expected.dataset = Dataset.from_dict({"label": LABELS[order], "place": order})
    assert expected.num_partitions == len(shares) == 6
    for client, share in enumerate(shares):
        assert sorted(expected.load_partition(client)["place"]) == share.tolist()
    assigned = np.concatenate(shares)
    assert len(np.unique(assigned)) == len(assigned) and min(map(len, shares)) >= 5
    repeated = make_partition(kind, LABELS, None, config, seed)
    assert all(np.array_equal(a, b) for a, b in zip(shares, repeated, strict=True))
    other_seed = make_partition(kind, LABELS, None, config, seed + 1)
    if kind != "flwr-pathological":  # deterministic here, so the seed changes almost nothing
        assert not all(np.array_equal(a, b) for a, b in zip(shares, other_seed, strict=True))


@needs_flwr_datasets
def test_default_number_of_shards_is_classes_per_client() -> None:
    shares = make_partition("flwr-shard", LABELS, None, CONFIG, 0)
    assert {len(share) for share in shares} == {3 * (len(LABELS) // 18)}
    five_shards = make_partition(
        "flwr-shard",
        LABELS,
        None,
        dataclasses.replace(CONFIG, arguments="num_shards_per_partition=5"),
        0,
    )
    assert {len(share) for share in five_shards} == {5 * (len(LABELS) // 30)}


@needs_flwr_datasets
def test_unassigned_examples_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["partition", "--dataset", "digits", "--partition", "flwr-shard"]
    assert main([*arguments, "--partition-args", "shard_size=50"]) == 0
    assert re.search(
        r"fedcog: \d+ of the 1442 training examples are not used\.", capsys.readouterr().err
    )
    assert main(["partition", "--dataset", "digits"]) == 0
    assert "not used" not in capsys.readouterr().err


@needs_flwr_datasets
def test_run_uses_the_partition_and_resumes(tmp_path: Path) -> None:
    small_settings: dict[str, Any] = {
        "partition": "flwr-pathological",
        "clients": 4,
        "local_steps": 2,
        "batch_size": 8,
        "threads": 1,
    }
    config = Experiment(rounds=1, seed=3, partition_seed=5, **small_settings)
    expected = make_partition("flwr-pathological", LABELS, None, PartitionConfig(4), 5)
    assert all(
        np.array_equal(indices.numpy(), share)
        for indices, share in zip(split_dataset(config, DIGITS), expected, strict=True)
    )
    fedcog.run(config, tmp_path, report=False)
    resumed = fedcog.run(dataclasses.replace(config, rounds=2), tmp_path, resume=True, report=False)
    uninterrupted = fedcog.run(
        dataclasses.replace(config, rounds=2), tmp_path / "whole", report=False
    )
    assert [line["loss"] for line in resumed.lines] == [
        line["loss"] for line in uninterrupted.lines
    ]
    assert config.partition_rule == "flwr-pathological, 2 classes each"


@needs_flwr_datasets
def test_partitioner_errors_name_fedcog_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        PartitionError,
        match=r"PathologicalPartitioner of flwr-datasets says: .* --classes-per-client",
    ):
        make_partition(
            "flwr-pathological", LABELS, None, dataclasses.replace(CONFIG, classes_per_client=11), 0
        )
    with pytest.raises(PartitionError, match=r"leaves one with \d+ examples, fewer than 10"):
        make_partition(
            "flwr-exponential", LABELS, None, dataclasses.replace(CONFIG, min_examples=10), 0
        )
    with pytest.raises(PartitionError, match="flwr-datasets says"):
        make_partition(
            "flwr-dirichlet",
            LABELS,
            None,
            PartitionConfig(clients=100, beta=0.01, min_examples=10),
            0,
        )
    with pytest.raises(PartitionError, match="ExponentialPartitioner"):
        make_partition(
            "flwr-exponential", LABELS, None, PartitionConfig(clients=1000, min_examples=1), 0
        )
    too_many_shards = dataclasses.replace(CONFIG, arguments="num_shards_per_partition=1000000")
    with pytest.raises(
        PartitionError, match=r"too few examples for these settings.* --partition-args"
    ):
        make_partition("flwr-shard", LABELS, None, too_many_shards, 0)
    multi_label = np.zeros((100, 3), dtype=bool)
    with pytest.raises(PartitionError, match="divides each class"):
        make_partition("flwr-shard", multi_label, None, PartitionConfig(clients=2), 0)
    assert len(make_partition("flwr-iid", multi_label, None, PartitionConfig(clients=2), 0)) == 2
    assert main(["partition", "--partition", "flwr-shard", "--clients", "5"]) == 0
    assert "examples per client and class" in capsys.readouterr().out


def test_missing_flwr_datasets_error_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PartitionError, match=r"pip install 'fedcog\[flwr-datasets\]'"):
        make_partition("flwr-shard", LABELS, None, CONFIG, 0)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("flwr-shard", "shard_size=0", "shard_size needs an integer from 1"),
        ("flwr-shard", "shard_size=99999999999", "shard_size needs an integer from 1"),
        ("flwr-shard", "shard_size", "shard_size needs an integer from 1"),
        ("flwr-shard", "shard_size=5 shard_size=6", "shard_size is given twice"),
        (
            "flwr-shard",
            "seed=5",
            "no 'seed': num_shards_per_partition, shard_size, keep_incomplete_shard are known",
        ),
        ("flwr-shard", "keep_incomplete_shard=1", "needs one of true, false"),
        (
            "flwr-pathological",
            "class_assignment_mode=__import__",
            "needs one of random, deterministic",
        ),
        ("flwr-dirichlet", "alpha=1", "partition 'flwr-dirichlet' takes no arguments"),
        ("flwr-iid", "shard_size=5", "partition 'flwr-iid' takes no arguments"),
    ],
)
def test_partition_arguments_are_checked_early(kind: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(partition=kind, partition_args=text)  # type: ignore[arg-type]
    assert f"partition_args: {message}" in str(caught.value) or message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "arguments", "description"),
    [
        ("flwr-dirichlet", "", "flwr-dirichlet, beta 0.5"),
        ("flwr-inner-dirichlet", "", "flwr-inner-dirichlet, beta 0.5"),
        ("flwr-pathological", "", "flwr-pathological, 3 classes each"),
        (
            "flwr-pathological",
            "class_assignment_mode=random",
            "flwr-pathological, 3 classes each, class_assignment_mode=random",
        ),
        ("flwr-shard", "", "flwr-shard, 3 shards each"),
        ("flwr-shard", "shard_size=50", "flwr-shard, shard_size=50"),
        *(
            (kind, "", kind)
            for kind in ("flwr-iid", "flwr-linear", "flwr-square", "flwr-exponential")
        ),
    ],
)
def test_partition_descriptions(kind: str, arguments: str, description: str) -> None:
    assert describe(kind, dataclasses.replace(CONFIG, arguments=arguments)) == description
    experiment = Experiment(
        partition=kind, beta=0.5, classes_per_client=3, partition_args=arguments
    )  # type: ignore[arg-type]
    assert experiment.partition_rule == description


def test_partition_arguments_are_parsed() -> None:
    assert parse_arguments("flwr-shard", ARGUMENTS["flwr-shard"]) == {
        "shard_size": 50,
        "keep_incomplete_shard": True,
    }
    assert parse_arguments("flwr-shard", "") == parse_arguments("iid", "shard_size=50") == {}
    shards = Experiment(partition="flwr-shard", partition_args=ARGUMENTS["flwr-shard"])
    assert dataclasses.replace(shards, partition="given").partition_rule == "given"
    assert shards.partition_rule == "flwr-shard, shard_size=50, keep_incomplete_shard=true"
    with pytest.raises(ConfigError, match="partition needs one of"):
        Experiment(partition="flwr-NaturalIdPartitioner")  # type: ignore[arg-type]
