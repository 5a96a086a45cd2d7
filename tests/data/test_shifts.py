"""Tests of feature shift (rotation, noise, tint) and label noise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import fedcog
from fedcog.data.partitions import schemes
from fedcog.data.partitions.schemes import PartitionConfig, PartitionError
from fedcog.data.shifts import apply_shift, rotate
from fedcog.runs.config.experiment import Experiment
from fedcog.testing import random_images, random_multi_label, random_vectors

SHARES = [torch.arange(50), torch.arange(50, 80), torch.arange(80, 90)]


class FixedGenerator(np.random.Generator):
    """A generator that always draws the same number."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.value = value

    def uniform(self, *bounds: float) -> float:  # type: ignore[override]
        return self.value


def test_tokens_have_no_shift() -> None:
    tokens = fedcog.from_arrays(np.arange(360).reshape(90, 4) % 7, np.arange(90) % 3)
    with pytest.raises(PartitionError, match="these examples are tokens: set --shift none"):
        apply_shift(tokens, SHARES, "noise", 0.5, 0.0, 0)


@pytest.mark.parametrize("shift", ["rotation", "noise", "colour"])
def test_shift_is_reproducible_and_changes_every_client(shift: str) -> None:
    plain = random_images(shape=(3, 8, 8))
    shifted = apply_shift(plain, SHARES, shift, 0.8, 0.0, 0)  # type: ignore[arg-type]
    repeated = apply_shift(plain, SHARES, shift, 0.8, 0.0, 0)  # type: ignore[arg-type]
    other_seed = apply_shift(plain, SHARES, shift, 0.8, 0.0, 1)  # type: ignore[arg-type]
    assert torch.equal(shifted.train_x, repeated.train_x) and not torch.equal(
        shifted.train_x, other_seed.train_x
    )
    assert torch.equal(shifted.test_x, plain.test_x) and torch.equal(shifted.train_y, plain.train_y)
    assert shifted.train_x.dtype == torch.uint8
    assert all(
        not torch.equal(shifted.train_x[indices], plain.train_x[indices]) for indices in SHARES
    )
    assert shifted.fingerprint != plain.fingerprint


def test_rotation_matches_pillow() -> None:
    """A quarter turn is exact. Other angles agree up to the interpolation."""
    x = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    quarter = rotate(x, 1.0, FixedGenerator(0.5))
    quarter_turns = [torch.rot90(x, 1, (2, 3)), torch.rot90(x, -1, (2, 3))]
    assert min(float((quarter - candidate).abs().max()) for candidate in quarter_turns) < 1e-5
    big = torch.nn.functional.interpolate(x, size=(63, 63), mode="bilinear")
    rotated = rotate(big, 1.0, FixedGenerator(30 / 180))[0, 0]
    image = Image.fromarray(big[0, 0].numpy())
    expected = [
        torch.from_numpy(np.array(image.rotate(sign * 30, Image.Resampling.BILINEAR)))
        for sign in (1, -1)
    ]
    center = slice(16, 48)
    assert (
        min(float((rotated - candidate)[center, center].abs().max()) for candidate in expected)
        < 0.05
    )


def test_tint_scales_channels_and_noise_scales_with_range() -> None:
    plain = random_images(num_train=600, shape=(3, 8, 8))
    shares = [torch.arange(300), torch.arange(300, 600)]
    tinted = apply_shift(plain, shares, "colour", 0.5, 0.0, 0)
    for indices in shares:
        for channel in range(3):
            before = plain.train_x[indices][:, channel].float()
            after = tinted.train_x[indices][:, channel].float()
            unclipped = (before > 20) & (after < 255)
            factors = after[unclipped] / before[unclipped]
            assert float(factors.max() - factors.min()) < 0.06, (
                "one factor per channel, up to rounding"
            )
            assert 0.45 < float(factors.mean()) < 1.55
    points = random_vectors(num_train=4000, size=9)
    scaled = replace(points, train_x=1000 * points.train_x)
    shares = [torch.arange(2000), torch.arange(2000, 4000)]
    relative_stds = []
    for data in (points, scaled):
        noisy = apply_shift(data, shares, "noise", 1.0, 0.0, 0)
        span = float(data.train_x.max() - data.train_x.min())
        relative_stds.append(
            [float((noisy.train_x - data.train_x)[indices].std()) / span for indices in shares]
        )
    assert (
        all(0 < std < 0.52 for std in relative_stds[0])
        and abs(relative_stds[0][0] - relative_stds[0][1]) > 0.01
    )
    assert relative_stds[1] == pytest.approx(relative_stds[0], rel=1e-3), (
        "noise is relative to the range of values"
    )


@given(st.floats(0.05, 1.0), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_label_noise_changes_the_given_fraction_of_labels(fraction: float, seed: int) -> None:
    plain = random_images(num_train=2000)
    noisy = apply_shift(
        plain, [torch.arange(1000), torch.arange(1000, 2000)], "none", 0.5, fraction, seed
    )
    wrong = float((noisy.train_y != plain.train_y).float().mean())
    assert wrong == pytest.approx(fraction, abs=0.07)
    assert bool(((noisy.train_y >= 0) & (noisy.train_y < 4)).all()) and torch.equal(
        noisy.train_x, plain.train_x
    )


def test_no_shift_returns_the_same_dataset() -> None:
    plain = random_images()
    assert apply_shift(plain, SHARES, "none", 0.5, 0.0, 0) is plain


@pytest.mark.parametrize(
    ("dataset", "shares", "shift", "noise", "reason"),
    [
        (random_vectors(), [torch.arange(60)], "rotation", 0.0, "is for images"),
        (random_vectors(), [torch.arange(60)], "colour", 0.0, "is for images"),
        (random_multi_label(), [torch.arange(90)], "none", 0.1, "one label each"),
        (
            random_images(),
            [torch.arange(60), torch.arange(50, 90)],
            "noise",
            0.0,
            "clients share examples",
        ),
    ],
)
def test_impossible_shift_is_refused(
    dataset: fedcog.Dataset, shares: list[Tensor], shift: str, noise: float, reason: str
) -> None:
    with pytest.raises(PartitionError, match=reason):
        apply_shift(dataset, shares, shift, 0.5, noise, 0)  # type: ignore[arg-type]


@given(st.integers(5, 20), st.floats(0.3, 10.0), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_label_quantity_assigns_every_example_once(clients: int, beta: float, seed: int) -> None:
    labels = np.repeat(np.arange(10), 100)
    shares = schemes.make_partition(
        "label-quantity", labels, None, PartitionConfig(clients, beta, min_examples=1), seed
    )
    assert sorted(np.concatenate(shares).tolist()) == list(range(1000))
    assert all(len(np.unique(labels[share])) <= 2 for share in shares)


def test_small_beta_makes_sizes_unequal() -> None:
    labels = np.repeat(np.arange(10), 100)

    def sizes(beta: float) -> list[int]:
        config = PartitionConfig(20, beta, min_examples=1)
        shares = schemes.make_partition("label-quantity", labels, None, config, 0)
        return [len(share) for share in shares]

    large_beta = sizes(1000.0)
    small_beta = sizes(0.3)
    assert max(large_beta) < 1.2 * min(large_beta) and max(small_beta) > 5 * min(small_beta)


def test_run_on_shifted_data_resumes(tmp_path: Path) -> None:
    config = Experiment(
        shift="rotation",
        label_noise=0.1,
        clients=4,
        rounds=2,
        local_steps=2,
        partition="label-quantity",
    )
    config = Experiment(
        **{**config.to_dict(), "algorithm": config.algorithm, "classes_per_client": 3, "beta": 1.0}
    )
    uninterrupted = fedcog.run(config, tmp_path / "straight", report=False)
    fedcog.run(Experiment(**{**vars(config), "rounds": 1}), tmp_path / "halted", report=False)
    resumed = fedcog.run(config, tmp_path / "halted", resume=True, report=False)
    assert [line["loss"] for line in resumed.lines] == [
        line["loss"] for line in uninterrupted.lines
    ]
    plain = fedcog.run(
        Experiment(**{**vars(config), "shift": "none"}), tmp_path / "plain", report=False
    )
    assert plain.lines[0]["loss"] != uninterrupted.lines[0]["loss"]
