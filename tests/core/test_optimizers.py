"""Tests of local optimizers: torch's steps, effective step size, gradient clipping."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcog.core.optimizers import Optimizer, clip_grads

TORCH_OPTIMIZERS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr, weight_decay=0.01),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.01),
}


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS)
def test_steps_equal_torch_optimizers(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(3, generator=draw).double() for name in "ab"}
    torch_params = [value.clone().requires_grad_() for value in start.values()]
    torch_optimizer = TORCH_OPTIMIZERS[kind](torch_params, 0.1)
    optimizer = Optimizer(kind, 0.9, 0.01)  # type: ignore[arg-type]
    params = start
    state = optimizer.init(start)
    for _ in range(10):
        grads = {name: torch.randn(3, generator=draw).double() for name in "ab"}
        for value, name in zip(torch_params, "ab", strict=True):
            value.grad = grads[name].clone()
        torch_optimizer.step()
        params, state = optimizer.step(params, grads, state, torch.tensor(0.1, dtype=torch.float64))
    for value, name in zip(torch_params, "ab", strict=True):
        assert float((value.detach() - params[name]).abs().max()) < 1e-12


def test_step_does_not_modify_its_arguments() -> None:
    params = {"a": torch.ones(3)}
    for kind in TORCH_OPTIMIZERS:
        optimizer = Optimizer(kind, 0.9, 0.01)  # type: ignore[arg-type]
        state = optimizer.init(params)
        optimizer.step(params, {"a": torch.ones(3)}, state, torch.tensor(0.1))
        assert torch.equal(params["a"], torch.ones(3))
        assert all(
            float(value.abs().max()) == 0
            for value in (*state.first.values(), *state.second.values())
        )


@given(steps=st.integers(1, 500), momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_effective_step_size_is_distance_under_constant_gradient(
    steps: int, momentum: float
) -> None:
    velocity = 0.0
    distance = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        distance += velocity
    step_size = Optimizer("sgd", momentum).effective_step_size(
        torch.tensor(float(steps), dtype=torch.float64), 0.01
    )
    assert float(step_size) == pytest.approx(0.01 * distance, rel=1e-9)


def test_effective_step_size_of_400_steps_is_39() -> None:
    step_size = Optimizer("sgd", 0.9).effective_step_size(torch.tensor(400.0), 0.01)
    assert float(step_size) == pytest.approx(39.1, abs=1e-3)


def test_clip_grads_scales_the_global_norm() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    clipped = clip_grads(grads, 1.0)
    assert float(clipped["a"]) == pytest.approx(0.6, rel=1e-5)
    assert float(clipped["b"]) == pytest.approx(0.8, rel=1e-5)
    assert float(clip_grads(grads, 10.0)["a"]) == 3.0
