"""Tests of client batches: sampling plans, augmentation, and validation splits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedcog.data import Dataset, FederatedData, client_batches, from_arrays

SIZE = 40


def dataset(shape: tuple[int, ...] = (3, 12, 10)) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SIZE, *shape), dtype=torch.uint8, generator=generator)
    y = torch.arange(SIZE) % 4
    return from_arrays(x, y, x[:4], y[:4], augment=True)


def federated(**settings: Any) -> FederatedData:
    indices = [torch.arange(0, 25), torch.arange(25, 35), torch.arange(35, 40)]
    return FederatedData(dataset(), indices, **{"seed": 1, "augment": True} | settings)


def test_client_sees_each_own_example_once_per_epoch() -> None:
    plan = federated().plan_batches(0, torch.tensor([0, 1, 2]), 5, 10)
    for client, owned in enumerate([range(0, 25), range(25, 35), range(35, 40)]):
        seen = plan.indices[client].flatten()
        for epoch in torch.split(seen, len(owned)):
            assert len(set(epoch.tolist())) == len(epoch)
            assert set(epoch.tolist()) <= set(owned)


def test_plan_depends_on_client_and_round_only() -> None:
    data = federated()
    all_three = data.plan_batches(3, torch.tensor([0, 1, 2]), 4, 6)
    alone = data.plan_batches(3, torch.tensor([1]), 4, 6)
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


def test_augmentation_matches_crop_and_flip_by_hand() -> None:
    data = federated(dtype=torch.float64)
    plan = data.plan_batches(0, torch.tensor([0]), 10, 30)
    assert plan.crops is not None
    batch = data.examples(plan.indices[0, 2], plan.crops[0, 2])
    mean = torch.tensor(dataset().mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(dataset().std, dtype=torch.float64)[:, None, None]
    for i in range(30):
        image = dataset().train_x[plan.indices[0, 2, i]]
        down, right, flip = plan.crops[0, 2, i].tolist()
        expected = (crop_by_hand(image, down, right, flip).double() / 255 - mean) / std
        assert float((batch["x"][i] - expected).abs().max()) < 1e-12
        assert batch["y"][i] == dataset().train_y[plan.indices[0, 2, i]]
    crops = plan.crops.reshape(-1, 3)
    assert crops.min(0).values.tolist() == [0, 0, 0] and crops.max(0).values.tolist() == [8, 8, 1]
    assert abs(float(crops[:, 2].double().mean()) - 0.5) < 0.1


def test_plan_without_augmentation_has_no_crops() -> None:
    assert federated(augment=False).plan_batches(0, torch.tensor([0]), 2, 3).crops is None


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.9])
def test_every_client_holds_out_validation_examples(fraction: float) -> None:
    data = federated(validation=fraction)
    held_out = set(data.validation.tolist())
    assert data.sizes.tolist() == [
        25 - round(25 * fraction),
        10 - round(10 * fraction),
        5 - min(round(5 * fraction), 4),
    ]
    seen = data.plan_batches(0, torch.tensor([0, 1, 2]), 20, 10).indices
    assert not held_out & set(seen.flatten().tolist())
    assert len(held_out) + int(data.sizes.sum()) == SIZE


def test_to_images_inverts_to_inputs() -> None:
    data = federated()
    assert torch.equal(data.to_images(data.to_inputs(data.train_x)), data.train_x)


def test_floating_point_data_is_unchanged() -> None:
    x = torch.randn(20, 7)
    plain = FederatedData(
        from_arrays(x, torch.arange(20) % 3, x[:3], torch.arange(3)), [torch.arange(20)], seed=0
    )
    assert torch.equal(plain.examples(torch.tensor([[4, 2]]))["x"], x[[4, 2]][None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_examples_stored_as_inputs_or_bytes_are_equal(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = torch.tensor([[3, 3], [39, 0]])
    stored_as_inputs = federated(augment=False, dtype=dtype)
    monkeypatch.setattr(client_batches, "MAX_INPUT_BYTES", 0)
    stored_as_bytes = federated(augment=False, dtype=dtype)
    assert stored_as_inputs.example_store["x"].dtype == dtype
    assert stored_as_bytes.example_store["x"].dtype == torch.uint8
    for pass_store in (False, True):
        from_inputs = stored_as_inputs.examples(
            index, None, stored_as_inputs.example_store if pass_store else None
        )
        from_bytes = stored_as_bytes.examples(
            index, None, stored_as_bytes.example_store if pass_store else None
        )
        assert torch.equal(from_inputs["x"], from_bytes["x"])
        assert torch.equal(from_inputs["y"], from_bytes["y"])
    assert torch.equal(
        stored_as_inputs.to_inputs(stored_as_inputs.train_x[:2]),
        stored_as_bytes.to_inputs(stored_as_bytes.train_x[:2]),
    )
