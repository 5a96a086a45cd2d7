"""Tests of counter-based random numbers: Philox, epoch indices, normals, permutations."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fedcog.core import rng


def counter_words(*values: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c, d = values
    return torch.tensor([a]), torch.tensor([b]), torch.tensor([c]), torch.tensor([d])


# Known answers of Random123, the authors' library.
@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_equals_known_answers(
    key: tuple[int, int], counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in rng.philox(key, counter_words(*counter))) == answer


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    length=st.integers(1, 100),
    seed=st.integers(0, 2**40),
    round=st.integers(0, 1000),
)
def test_epoch_indices_are_permutations_independent_of_the_cohort(
    sizes: list[int], length: int, seed: int, round: int
) -> None:
    client_ids = torch.arange(len(sizes)) * 7
    stacked = rng.epoch_indices(seed, "batches", round, client_ids, torch.tensor(sizes), length)
    assert stacked.shape == (len(sizes), length)
    for row, size in enumerate(sizes):
        for epoch in torch.split(stacked[row], size):
            assert len(set(epoch.tolist())) == len(epoch), "an example repeats within an epoch"
            assert set(epoch.tolist()) <= set(range(size))
        separate = rng.epoch_indices(
            seed, "batches", round, client_ids[row : row + 1], torch.tensor([size]), length
        )
        assert torch.equal(separate[0], stacked[row])


def test_epoch_indices_are_uniformly_shuffled() -> None:
    indices = rng.epoch_indices(0, "batches", 0, torch.tensor([0]), torch.tensor([5]), 5 * 2000)
    epochs = indices[0].reshape(-1, 5)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 120  # all orders of five occur
    first = torch.bincount(epochs[:, 0], minlength=5)
    chi_square = float(((first - 400.0) ** 2 / 400).sum())
    assert chi_square < 18.5  # 4 degrees of freedom, p = 0.001


def test_streams_differ_by_seed_purpose_round_and_client() -> None:
    def draw(
        seed: int = 0, purpose: str = "noise", round: int = 0, client: int = 0
    ) -> torch.Tensor:
        return rng.normal(seed, purpose, round, torch.tensor([client]), (50,))

    others = [draw(seed=1), draw(purpose="other"), draw(round=1), draw(client=1)]
    assert torch.equal(draw(), draw())
    assert all(float((draw() - other).abs().min()) > 0 for other in others)


def test_normal_has_moments_of_the_normal_distribution() -> None:
    numbers = rng.normal(0, "noise", 0, torch.arange(4), (3, 25_000)).double()
    assert numbers.shape == (4, 3, 25_000)
    flat = numbers.flatten()
    assert abs(float(flat.mean())) < 0.01
    assert abs(float((flat**2).mean()) - 1) < 0.01
    assert abs(float((flat**3).mean())) < 0.03
    assert abs(float((flat**4).mean()) - 3) < 0.06
    assert abs(float(torch.corrcoef(flat.reshape(4, -1))[0, 1])) < 0.015


@given(below=st.integers(1, 2**31 - 1))
def test_integers_cover_the_range(below: int) -> None:
    drawn = rng.integers(torch.tensor([0, 2**31, 2**32 - 1]), below)
    assert drawn.tolist() == [0, below // 2, below - 1]


def test_permutation_is_a_permutation_that_changes_by_round() -> None:
    order = rng.permutation(0, "sample", 3, 100).tolist()
    assert sorted(order) == list(range(100))
    assert order != rng.permutation(0, "sample", 4, 100).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_draws_equal_cpu_draws() -> None:
    client_ids = torch.arange(5)
    sizes = torch.tensor([10, 100, 33, 7, 64])
    cpu_indices = rng.epoch_indices(1, "batches", 2, client_ids, sizes, 500)
    gpu_indices = rng.epoch_indices(1, "batches", 2, client_ids.cuda(), sizes.cuda(), 500)
    assert torch.equal(cpu_indices, gpu_indices.cpu())
    cpu_normals = rng.normal(1, "noise", 2, client_ids, (7, 11))
    gpu_normals = rng.normal(1, "noise", 2, client_ids.cuda(), (7, 11))
    assert float((cpu_normals - gpu_normals.cpu()).abs().max()) < 1e-6
