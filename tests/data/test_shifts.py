"""Feature shift (rotation, noise, tint) and label noise."""

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


class Fixed(np.random.Generator):
    """Draws the same number always."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.value = value

    def uniform(self, *bounds: float) -> float:  # type: ignore[override]
        return self.value


@pytest.mark.parametrize("shift", ["rotation", "noise", "colour"])
def test_every_client_is_shifted_in_its_own_way_and_always_the_same(shift: str) -> None:
    plain = random_images(shape=(3, 8, 8))
    one, again = (apply_shift(plain, SHARES, shift, 0.8, 0.0, 0) for _ in range(2))  # type: ignore[arg-type]
    other = apply_shift(plain, SHARES, shift, 0.8, 0.0, 1)  # type: ignore[arg-type]
    assert torch.equal(one.train_x, again.train_x) and not torch.equal(one.train_x, other.train_x)
    assert torch.equal(one.test_x, plain.test_x) and torch.equal(one.train_y, plain.train_y)
    assert one.train_x.dtype == torch.uint8
    assert all(not torch.equal(one.train_x[own], plain.train_x[own]) for own in SHARES)
    assert one.fingerprint != plain.fingerprint


def test_a_turned_image_is_what_pillow_makes_of_it() -> None:
    """A quarter turn exactly; another angle as near as two ways of interpolating come."""
    x = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(0))
    quarter = rotate(x, 1.0, Fixed(0.5))
    turned = torch.rot90(x, 1, (2, 3)), torch.rot90(x, -1, (2, 3))
    assert min(float((quarter - one).abs().max()) for one in turned) < 1e-5
    big = torch.nn.functional.interpolate(x, size=(63, 63), mode="bilinear")
    found = rotate(big, 1.0, Fixed(30 / 180))[0, 0]
    picture = Image.fromarray(big[0, 0].numpy())
    pillow = [
        torch.from_numpy(np.array(picture.rotate(sign * 30, Image.Resampling.BILINEAR)))
        for sign in (1, -1)
    ]
    inside = slice(16, 48)
    assert min(float((found - one)[inside, inside].abs().max()) for one in pillow) < 0.05


def test_a_tint_scales_channels_and_noise_has_the_clients_deviation() -> None:
    plain = random_images(num_train=600, shape=(3, 8, 8))
    shares = [torch.arange(300), torch.arange(300, 600)]
    tinted = apply_shift(plain, shares, "colour", 0.5, 0.0, 0)
    for own in shares:
        for channel in range(3):
            before = plain.train_x[own][:, channel].float()
            after = tinted.train_x[own][:, channel].float()
            dark = (before > 20) & (after < 255)
            factors = after[dark] / before[dark]
            assert float(factors.max() - factors.min()) < 0.06, (
                "one factor a channel, but for rounding"
            )
            assert 0.45 < float(factors.mean()) < 1.55
    points = random_vectors(num_train=4000, size=9)
    wide = replace(points, train_x=1000 * points.train_x)
    shares = [torch.arange(2000), torch.arange(2000, 4000)]
    found = []
    for one in (points, wide):
        noisy = apply_shift(one, shares, "noise", 1.0, 0.0, 0)
        span = float(one.train_x.max() - one.train_x.min())
        found.append([float((noisy.train_x - one.train_x)[own].std()) / span for own in shares])
    assert all(0 < one < 0.52 for one in found[0]) and abs(found[0][0] - found[0][1]) > 0.01
    assert found[1] == pytest.approx(found[0], rel=1e-3), (
        "a share of the range of values, whatever that is"
    )


@given(st.floats(0.05, 1.0), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_label_noise_is_its_share_and_always_wrong(share: float, seed: int) -> None:
    plain = random_images(num_train=2000)
    noisy = apply_shift(
        plain, [torch.arange(1000), torch.arange(1000, 2000)], "none", 0.5, share, seed
    )
    wrong = float((noisy.train_y != plain.train_y).float().mean())
    assert wrong == pytest.approx(share, abs=0.07)
    assert bool(((noisy.train_y >= 0) & (noisy.train_y < 4)).all()) and torch.equal(
        noisy.train_x, plain.train_x
    )


def test_nothing_asked_for_is_nothing_changed() -> None:
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
def test_what_cannot_be_shifted_is_refused(
    dataset: fedcog.Dataset, shares: list[Tensor], shift: str, noise: float, reason: str
) -> None:
    with pytest.raises(PartitionError, match=reason):
        apply_shift(dataset, shares, shift, 0.5, noise, 0)  # type: ignore[arg-type]


@given(st.integers(5, 20), st.floats(0.3, 10.0), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_label_quantity_gives_every_example_away_once(clients: int, beta: float, seed: int) -> None:
    labels = np.repeat(np.arange(10), 100)
    shares = schemes.make_partition(
        "label-quantity", labels, None, PartitionConfig(clients, beta, min_examples=1), seed
    )
    assert sorted(np.concatenate(shares).tolist()) == list(range(1000))
    assert all(len(np.unique(labels[share])) <= 2 for share in shares)


def test_small_beta_makes_sizes_unequal() -> None:
    labels = np.repeat(np.arange(10), 100)
    even, odd = (
        [
            len(share)
            for share in schemes.make_partition(
                "label-quantity", labels, None, PartitionConfig(20, beta, min_examples=1), 0
            )
        ]
        for beta in (1000.0, 0.3)
    )
    assert max(even) < 1.2 * min(even) and max(odd) > 5 * min(odd)


def test_a_run_on_shifted_data_resumes(tmp_path: Path) -> None:
    one = Experiment(
        shift="rotation",
        label_noise=0.1,
        clients=4,
        rounds=2,
        local_steps=2,
        partition="label-quantity",
    )
    one = Experiment(
        **{**one.to_dict(), "algorithm": one.algorithm, "classes_per_client": 3, "beta": 1.0}
    )
    straight = fedcog.run(one, tmp_path / "straight", report=False)
    fedcog.run(Experiment(**{**vars(one), "rounds": 1}), tmp_path / "halted", report=False)
    resumed = fedcog.run(one, tmp_path / "halted", resume=True, report=False)
    assert [line["loss"] for line in resumed.lines] == [line["loss"] for line in straight.lines]
    plain = fedcog.run(
        Experiment(**{**vars(one), "shift": "none"}), tmp_path / "plain", report=False
    )
    assert plain.lines[0]["loss"] != straight.lines[0]["loss"]
