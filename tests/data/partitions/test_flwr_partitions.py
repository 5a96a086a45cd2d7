"""Partitions of flwr-datasets: the same as its partitioners called directly."""

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
there = pytest.mark.skipif(
    importlib.util.find_spec("flwr_datasets") is None, reason="needs flwr-datasets"
)

CALLS: dict[str, dict[str, Any]] = {
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


def test_every_name_is_a_setting() -> None:
    assert set(get_args(experiment.PartitionName)) == {*PARTITIONS, "given", *FLWR_PARTITIONS}
    assert tuple(FLWR_PARTITIONS) == tuple(CALLS)


@there
@pytest.mark.parametrize("kind", FLWR_PARTITIONS)
@pytest.mark.parametrize("seed", [0, 2**40])
def test_shares_are_those_of_flwr_datasets_called_directly(kind: str, seed: int) -> None:
    from datasets import Dataset
    from flwr_datasets import partitioner

    config = dataclasses.replace(CONFIG, arguments=ARGUMENTS.get(kind, ""))
    shares = make_partition(kind, LABELS, None, config, seed)
    order = np.arange(len(LABELS))
    more = {"partition_by": "label", "seed": seed}
    if not FLWR_PARTITIONS[kind].by_label:
        order = rng.permutation(seed, "partition/0", 0, len(LABELS)).numpy()
        more = {}
    theirs = getattr(partitioner, FLWR_PARTITIONS[kind].partitioner)(**CALLS[kind], **more)
    theirs.dataset = Dataset.from_dict({"label": LABELS[order], "place": order})
    assert theirs.num_partitions == len(shares) == 6
    for client, share in enumerate(shares):
        assert sorted(theirs.load_partition(client)["place"]) == share.tolist()
    every = np.concatenate(shares)
    assert len(np.unique(every)) == len(every) and min(map(len, shares)) >= 5
    again = make_partition(kind, LABELS, None, config, seed)
    assert all(np.array_equal(one, other) for one, other in zip(shares, again, strict=True))
    other = make_partition(kind, LABELS, None, config, seed + 1)
    if kind != "flwr-pathological":  # whose classes are fixed here, and so is nearly all else
        assert not all(np.array_equal(one, same) for one, same in zip(shares, other, strict=True))


@there
def test_default_number_of_shards_is_classes_per_client() -> None:
    shares = make_partition("flwr-shard", LABELS, None, CONFIG, 0)
    assert {len(share) for share in shares} == {3 * (len(LABELS) // 18)}
    more = make_partition(
        "flwr-shard",
        LABELS,
        None,
        dataclasses.replace(CONFIG, arguments="num_shards_per_partition=5"),
        0,
    )
    assert {len(share) for share in more} == {5 * (len(LABELS) // 30)}


@there
def test_unassigned_examples_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "partition",
                "--dataset",
                "digits",
                "--partition",
                "flwr-shard",
                "--partition-args",
                "shard_size=50",
            ]
        )
        == 0
    )
    assert re.search(
        r"fedcog: \d+ of the 1442 training examples are not used\.", capsys.readouterr().err
    )
    assert (
        main(["partition", "--dataset", "digits"]) == 0 and "nobody" not in capsys.readouterr().err
    )


@there
def test_a_run_uses_the_partition_and_resumes_with_it(tmp_path: Path) -> None:
    small = {
        "partition": "flwr-pathological",
        "clients": 4,
        "local_steps": 2,
        "batch_size": 8,
        "threads": 1,
    }
    one = Experiment(rounds=1, seed=3, partition_seed=5, **small)  # type: ignore[arg-type]
    direct = make_partition("flwr-pathological", LABELS, None, PartitionConfig(4), 5)
    assert all(
        np.array_equal(mine.numpy(), theirs)
        for mine, theirs in zip(split_dataset(one, DIGITS), direct, strict=True)
    )
    fedcog.run(one, tmp_path, report=False)
    done = fedcog.run(dataclasses.replace(one, rounds=2), tmp_path, resume=True, report=False)
    whole = fedcog.run(dataclasses.replace(one, rounds=2), tmp_path / "whole", report=False)
    assert [line["loss"] for line in done.lines] == [line["loss"] for line in whole.lines]
    assert one.partition_rule == "flwr-pathological, 2 classes each"


@there
def test_errors_name_our_settings(capsys: pytest.CaptureFixture[str]) -> None:
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
    many = dataclasses.replace(CONFIG, arguments="num_shards_per_partition=1000000")
    with pytest.raises(
        PartitionError, match=r"too few examples for these settings.* --partition-args"
    ):
        make_partition("flwr-shard", LABELS, None, many, 0)
    several = np.zeros((100, 3), dtype=bool)
    with pytest.raises(PartitionError, match="divides each class"):
        make_partition("flwr-shard", several, None, PartitionConfig(clients=2), 0)
    assert len(make_partition("flwr-iid", several, None, PartitionConfig(clients=2), 0)) == 2
    assert main(["partition", "--partition", "flwr-shard", "--clients", "5"]) == 0
    assert "examples per client and class" in capsys.readouterr().out


def test_without_flwr_datasets_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PartitionError, match=r"pip install 'fedcog\[flwr-datasets\]'"):
        make_partition("flwr-shard", LABELS, None, CONFIG, 0)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
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
def test_arguments_are_checked_before_anything_runs(kind: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment(partition=kind, partition_args=text)  # type: ignore[arg-type]
    assert f"partition_args: {words}" in str(caught.value) or words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
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
def test_descriptions(kind: str, arguments: str, words: str) -> None:
    assert describe(kind, dataclasses.replace(CONFIG, arguments=arguments)) == words
    experiment = Experiment(
        partition=kind, beta=0.5, classes_per_client=3, partition_args=arguments
    )  # type: ignore[arg-type]
    assert experiment.partition_rule == words


def test_arguments_are_read() -> None:
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
