"""Batches, augmentation and validation split of a partitioned data set."""

import pytest
import torch
from torch import Tensor

from fedcog.data import Dataset, FederatedData, from_arrays
from fedcog.data import client_batches as module

SIZE = 40


def dataset(shape: tuple[int, ...] = (3, 12, 10)) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SIZE, *shape), dtype=torch.uint8, generator=draw)
    y = torch.arange(SIZE) % 4
    return from_arrays(x, y, x[:4], y[:4], augment=True)


def federated(**settings: object) -> FederatedData:
    indices = [torch.arange(0, 25), torch.arange(25, 35), torch.arange(35, 40)]
    return FederatedData(dataset(), indices, **{"seed": 1, "augment": True} | settings)  # type: ignore[arg-type]


def test_a_client_sees_its_own_examples_each_once_before_any_twice() -> None:
    plan = federated().plan_batches(0, torch.tensor([0, 1, 2]), 5, 10)
    for client, owned in enumerate([range(0, 25), range(25, 35), range(35, 40)]):
        seen = plan.indices[client].flatten()
        for epoch in torch.split(seen, len(owned)):
            assert len(set(epoch.tolist())) == len(epoch)
            assert set(epoch.tolist()) <= set(owned)


def test_a_plan_does_not_depend_on_company_and_changes_with_the_round() -> None:
    data = federated()
    all_three, alone = (data.plan_batches(3, torch.tensor(who), 4, 6) for who in ([0, 1, 2], [1]))
    assert all_three.crops is not None and alone.crops is not None
    assert torch.equal(all_three.indices[1], alone.indices[0])
    assert torch.equal(all_three.crops[1], alone.crops[0])
    later = data.plan_batches(4, torch.tensor([1]), 4, 6)
    assert not torch.equal(later.indices, alone.indices)


def crop_by_hand(image: Tensor, down: int, right: int, flip: int) -> Tensor:
    channels, height, width = image.shape
    framed = torch.zeros(channels, height + 8, width + 8, dtype=image.dtype)
    framed[:, 4:-4, 4:-4] = image
    crop = framed[:, down : down + height, right : right + width]
    return crop.flip(-1) if flip else crop


def test_augmentation_is_crop_and_flip_one_image_at_a_time() -> None:
    data = federated(dtype=torch.float64)
    plan = data.plan_batches(0, torch.tensor([0]), 10, 30)
    assert plan.crops is not None
    batch = data.examples(plan.indices[0, 2], plan.crops[0, 2])
    mean, std = (
        torch.tensor(part, dtype=torch.float64)[:, None, None]
        for part in (dataset().mean, dataset().std)
    )
    for place in range(30):
        image = dataset().train_x[plan.indices[0, 2, place]]
        down, right, flip = plan.crops[0, 2, place].tolist()
        expected = (crop_by_hand(image, down, right, flip).double() / 255 - mean) / std
        assert float((batch["x"][place] - expected).abs().max()) < 1e-12
        assert batch["y"][place] == dataset().train_y[plan.indices[0, 2, place]]
    moves = plan.crops.reshape(-1, 3)
    assert moves.min(0).values.tolist() == [0, 0, 0] and moves.max(0).values.tolist() == [8, 8, 1]
    assert abs(float(moves[:, 2].double().mean()) - 0.5) < 0.1


def test_without_augmentation_nothing_moves() -> None:
    assert federated(augment=False).plan_batches(0, torch.tensor([0]), 2, 3).crops is None


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_validation_is_held_out_of_every_client(share: float) -> None:
    data = federated(validation=share)
    held_out = set(data.validation.tolist())
    assert data.sizes.tolist() == [
        25 - round(25 * share),
        10 - round(10 * share),
        5 - min(round(5 * share), 4),
    ]
    seen = data.plan_batches(0, torch.tensor([0, 1, 2]), 20, 10).indices
    assert not held_out & set(seen.flatten().tolist())
    assert len(held_out) + int(data.sizes.sum()) == SIZE


def test_pictures_undo_inputs() -> None:
    data = federated()
    assert torch.equal(data.to_images(data.to_inputs(data.train_x)), data.train_x)


def test_floating_data_is_used_as_it_is() -> None:
    x = torch.randn(20, 7)
    plain = FederatedData(
        from_arrays(x, torch.arange(20) % 3, x[:3], torch.arange(3)), [torch.arange(20)], seed=0
    )
    assert torch.equal(plain.examples(torch.tensor([[4, 2]]))["x"], x[[4, 2]][None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_examples_kept_as_inputs_are_the_same_to_the_last_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = torch.tensor([[3, 3], [39, 0]])
    kept = federated(augment=False, dtype=dtype)
    monkeypatch.setattr(module, "MAX_INPUT_BYTES", 0)
    made = federated(augment=False, dtype=dtype)
    assert kept.example_store["x"].dtype == dtype
    assert made.example_store["x"].dtype == torch.uint8
    for stock in (None, "own"):
        here, there = (
            data.examples(index, None, data.example_store if stock else None)
            for data in (kept, made)
        )
        assert torch.equal(here["x"], there["x"])
        assert torch.equal(here["y"], there["y"])
    assert torch.equal(kept.to_inputs(kept.train_x[:2]), made.to_inputs(made.train_x[:2]))
