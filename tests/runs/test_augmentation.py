"""Tests of the user's augmentation: what it receives, and that its random numbers are keyed."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedcog
from fedcog import ConfigError, Experiment, FedCOG
from fedcog.data.client_batches import Augmentation
from fedcog.models.ops.keyed_random import KeyedRandom, StepKey, seed_words
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.setup import ExperimentSetup
from tests.support.user_models import jitter

TINY = Experiment(
    clients=4, rounds=2, local_steps=3, batch_size=8, threads=1, workers=1, partition="iid"
)


def losses(run: fedcog.Run) -> list[float]:
    return [line["loss"] for line in run.lines]


def identity(x: Tensor, random: KeyedRandom) -> Tensor:
    return x


def test_identity_changes_no_bit(tmp_path: Path) -> None:
    plain = fedcog.run(TINY, tmp_path / "plain", report=False)
    same = fedcog.run(TINY, tmp_path / "same", augmentation=identity, report=False)
    assert losses(plain) == losses(same)
    changed = fedcog.run(TINY, tmp_path / "changed", augmentation=jitter, report=False)
    assert losses(plain) != losses(changed)


@pytest.mark.parametrize("kind", ["workers", "stacked", "cohorts"])
def test_numbers_do_not_depend_on_how_clients_train(kind: str, tmp_path: Path) -> None:
    base = dataclasses.replace(TINY, precision="float64", mapping="loop")
    alone = fedcog.run(base, tmp_path / "loop", augmentation=jitter, report=False)
    if kind == "workers":
        other = dataclasses.replace(base, workers=2, threads=2)
        run = fedcog.run(other, tmp_path / kind, augmentation=jitter, report=False)
    elif kind == "cohorts":
        other = dataclasses.replace(base, mapping="vmap")
        run = fedcog.run(other, tmp_path / kind, augmentation=jitter, report=False)
    else:
        other = dataclasses.replace(base, mapping="vmap")
        run = fedcog.compare([other], [0, 1], tmp_path / kind, augmentation=jitter)[0]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-9)


def test_images_are_in_0_to_1_and_are_normalized_afterwards(tmp_path: Path) -> None:
    seen = []

    def watch(x: Tensor, random: KeyedRandom) -> Tensor:
        seen.append(x.clone())
        return torch.ones_like(x)

    setup = ExperimentSetup(
        dataclasses.replace(TINY, mapping="loop"), UserObjects(augmentation=watch)
    )
    white = (1 - setup.dataset.mean[0]) / setup.dataset.std[0]
    inputs: list[Tensor] = []
    forward = setup.model._train.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0].clone())
    )
    seen.clear()
    server = setup.make_server()
    server.backend.run_round(server.start_round(0))
    forward.remove()
    assert all(float(x.min()) >= 0 and 0.9 < float(x.max()) <= 1 for x in seen)
    assert len(seen) == 4 * 3
    assert all(torch.allclose(x, torch.full_like(x, white)) for x in inputs)


def test_evaluation_and_generation_do_not_see_it(tmp_path: Path) -> None:
    def black(x: Tensor, random: KeyedRandom) -> Tensor:
        return torch.zeros_like(x)

    still = dataclasses.replace(TINY, lr=1e-12)
    plain = fedcog.run(still, tmp_path / "plain", report=False)
    run = fedcog.run(still, tmp_path / "black", augmentation=black, report=False)
    assert run.last == plain.last


def test_resume_is_byte_equal_and_needs_the_same_function(tmp_path: Path) -> None:
    algorithm = FedCOG(count=8, steps=2, start_round=1)
    experiment = dataclasses.replace(TINY, algorithm=algorithm, rounds=3)
    straight = fedcog.run(experiment, tmp_path / "a", augmentation=jitter, report=False)
    short = dataclasses.replace(experiment, rounds=1)
    fedcog.run(short, tmp_path / "b", augmentation=jitter, report=False)
    for other, reason in ((None, "name it again, --augmentation"), (identity, "or augmentation")):
        with pytest.raises(fedcog.RecordError, match=reason):
            fedcog.run(experiment, tmp_path / "b", augmentation=other, resume=True, report=False)
    resumed = fedcog.run(experiment, tmp_path / "b", augmentation=jitter, resume=True, report=False)
    name = "checkpoint.safetensors"
    assert (straight.path / name).read_bytes() == (resumed.path / name).read_bytes()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, random: x + torch.rand(1), "draws random numbers of its own"),
        (lambda x, random: x[:, :, 1:], "must return"),
        (lambda x, random: x.double(), "must return torch.float32"),
        (lambda x, random: None, "not NoneType"),
        (lambda x, random: x * float("nan"), "returns NaN or infinity"),
        (lambda x: x, "failed: TypeError"),
    ],
)
def test_unsuitable_functions_are_refused(function: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        fedcog.run(TINY, tmp_path, augmentation=function, report=False)


def make_random(step: int = 0) -> KeyedRandom:
    zero = torch.tensor(0)
    return KeyedRandom(StepKey(seed_words(0), zero, zero, zero + step))


def test_random_numbers_have_their_distributions() -> None:
    random = make_random()
    uniform = random.uniform(20_000).double()
    normal = random.normal(20_000).double()
    drawn = random.integers(5, 20_000)
    kept = random.bernoulli(0.3, 20_000)
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(uniform.std()) == pytest.approx(12**-0.5, abs=0.01)
    assert float(normal.mean()) == pytest.approx(0, abs=0.03)
    assert float(normal.std()) == pytest.approx(1, abs=0.03)
    assert drawn.bincount().double().div(20_000).tolist() == pytest.approx([0.2] * 5, abs=0.01)
    assert float(kept.double().mean()) == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(make_random().uniform(8), make_random(1).uniform(8))
    again = make_random()
    assert torch.equal(again.uniform(20_000).double(), uniform)
    with pytest.raises(ValueError, match="probability"):
        random.bernoulli(1.5, 3)


def test_uniform_numbers_are_below_1(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, 2**32 - 1])
    monkeypatch.setattr(KeyedRandom, "words", lambda self, *shape: ends)
    assert make_random().uniform(2).tolist() == [0, 1 - 2**-24]


def test_shapes_are_numbers_or_one_sequence() -> None:
    for draw in ("words", "uniform", "normal"):
        numbers = getattr(make_random(), draw)(2, 3)
        assert numbers.shape == (2, 3)
        assert torch.equal(numbers, getattr(make_random(), draw)(torch.Size((2, 3))))
        assert torch.equal(numbers, getattr(make_random(), draw)([2, 3]))
    assert make_random().integers(5, (2, 3)).shape == (2, 3)
    assert make_random().bernoulli(0.5, (2, 3)).shape == (2, 3)
    assert make_random().uniform().shape == make_random().uniform(()).shape == ()


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()])
def test_hidden_random_numbers_are_found_where_calls_agree(
    tmp_path: Path, draw: Callable[[], float]
) -> None:
    """Calls may agree by chance; the state of the generator tells."""

    def rarely_flips(x: Tensor, keyed: KeyedRandom) -> Tensor:
        return x.flip(3) if draw() < 1e-9 else x

    with pytest.raises(ConfigError, match="draws random numbers of its own"):
        fedcog.run(TINY, tmp_path, augmentation=rarely_flips)


def test_function_with_decisions_trains_clients_one_by_one(tmp_path: Path) -> None:
    def decides(x: Tensor, random: KeyedRandom) -> Tensor:
        return x.flip(3) if float(random.uniform(1)[0]) < 0.5 else x

    run = fedcog.run(TINY, tmp_path / "auto", augmentation=decides, report=False)
    loop = dataclasses.replace(TINY, mapping="loop")
    same = fedcog.run(loop, tmp_path / "loop", augmentation=decides, report=False)
    assert run.lines[-1]["loss"] == same.lines[-1]["loss"]
    at_once = dataclasses.replace(TINY, mapping="vmap")
    with pytest.raises(ConfigError, match=r"cannot do with this augmentation.*torch\.where"):
        fedcog.run(at_once, tmp_path / "vmap", augmentation=decides, report=False)


def test_values_of_a_function_make_other_rows(tmp_path: Path) -> None:
    def noise(scale: float) -> Augmentation:
        return lambda x, random: x + scale * random.normal(*x.shape)

    runs = [
        fedcog.run(
            dataclasses.replace(TINY, seed=seed, shift="rotation"),
            tmp_path / f"{seed}-{scale}",
            augmentation=noise(scale),
            report=False,
        )
        for seed, scale in ((0, 0.1), (1, 0.1), (1, 0.2))
    ]
    assert [len(each.runs) for each in fedcog.group(runs)] == [2, 1]
