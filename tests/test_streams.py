import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fedcog import streams


def words(*values: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c, d = (torch.tensor([value]) for value in values)
    return a, b, c, d


# The known answers that come with Random123, the authors' own library.
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
def test_philox_gives_the_known_answers(
    key: tuple[int, int], counter: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in streams.philox(key, words(*counter))) == answer


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    length=st.integers(1, 100),
    seed=st.integers(0, 2**40),
    round=st.integers(0, 1000),
)
def test_windows_are_fresh_permutations_and_do_not_depend_on_company(
    sizes: list[int], length: int, seed: int, round: int
) -> None:
    clients = torch.arange(len(sizes)) * 7
    together = streams.windows(seed, "batches", round, clients, torch.tensor(sizes), length)
    assert together.shape == (len(sizes), length)
    for row, size in enumerate(sizes):
        for epoch in torch.split(together[row], size):
            assert len(set(epoch.tolist())) == len(epoch), "an example came twice before all came once"
            assert set(epoch.tolist()) <= set(range(size))
        alone = streams.windows(seed, "batches", round, clients[row : row + 1], torch.tensor([size]), length)
        assert torch.equal(alone[0], together[row])


def test_windows_shuffle() -> None:
    epochs = streams.windows(0, "batches", 0, torch.tensor([0]), torch.tensor([5]), 5 * 2000)[0].reshape(-1, 5)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 120  # every order of five occurs
    first = torch.bincount(epochs[:, 0], minlength=5)
    assert float(((first - 400.0) ** 2 / 400).sum()) < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_streams_differ_by_seed_purpose_round_and_client() -> None:
    def draw(seed: int = 0, purpose: str = "noise", round: int = 0, client: int = 0) -> torch.Tensor:
        return streams.normal(seed, purpose, round, torch.tensor([client]), (50,))

    others = [draw(seed=1), draw(purpose="other"), draw(round=1), draw(client=1)]
    assert torch.equal(draw(), draw())
    assert all(float((draw() - other).abs().min()) > 0 for other in others)


def test_normal_numbers_are_normal() -> None:
    numbers = streams.normal(0, "noise", 0, torch.arange(4), (3, 25_000)).double()
    assert numbers.shape == (4, 3, 25_000)
    flat = numbers.flatten()
    assert abs(float(flat.mean())) < 0.01
    assert abs(float((flat**2).mean()) - 1) < 0.01
    assert abs(float((flat**3).mean())) < 0.03
    assert abs(float((flat**4).mean()) - 3) < 0.06
    assert abs(float(torch.corrcoef(flat.reshape(4, -1))[0, 1])) < 0.015


@given(below=st.integers(1, 2**31 - 1))
def test_integers_stay_in_range(below: int) -> None:
    drawn = streams.integers(torch.tensor([0, 2**31, 2**32 - 1]), below)
    assert drawn.tolist() == [0, below // 2, below - 1]


def test_permutation_is_one() -> None:
    assert sorted(streams.permutation(0, "sample", 3, 100).tolist()) == list(range(100))
    assert streams.permutation(0, "sample", 3, 100).tolist() != streams.permutation(0, "sample", 4, 100).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same() -> None:
    clients = torch.arange(5)
    sizes = torch.tensor([10, 100, 33, 7, 64])
    here = streams.windows(1, "batches", 2, clients, sizes, 500)
    there = streams.windows(1, "batches", 2, clients.cuda(), sizes.cuda(), 500)
    assert torch.equal(here, there.cpu())
    here, there = (streams.normal(1, "noise", 2, c, (7, 11)) for c in (clients, clients.cuda()))
    assert float((here - there.cpu()).abs().max()) < 1e-6
