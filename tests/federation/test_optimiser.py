import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcog.optimiser import Optimiser, clip

TORCH = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr, weight_decay=0.01),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.01),
}


@pytest.mark.parametrize("kind", TORCH)
def test_the_steps_are_torchs(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    start = {name: torch.randn(3, generator=draw).double() for name in "ab"}
    theirs = [value.clone().requires_grad_() for value in start.values()]
    reference, ours = TORCH[kind](theirs, 0.1), Optimiser(kind, 0.9, 0.01)  # type: ignore[arg-type]
    params, motion = start, ours.start(start)
    for _ in range(10):
        grads = {name: torch.randn(3, generator=draw).double() for name in "ab"}
        for value, name in zip(theirs, "ab", strict=True):
            value.grad = grads[name].clone()
        reference.step()
        params, motion = ours.step(params, grads, motion, torch.tensor(0.1, dtype=torch.float64))
    for value, name in zip(theirs, "ab", strict=True):
        assert float((value.detach() - params[name]).abs().max()) < 1e-12


def test_nothing_given_is_written_to() -> None:
    params = {"a": torch.ones(3)}
    for kind in TORCH:
        optimiser = Optimiser(kind, 0.9, 0.01)  # type: ignore[arg-type]
        motion = optimiser.start(params)
        optimiser.step(params, {"a": torch.ones(3)}, motion, torch.tensor(0.1))
        assert torch.equal(params["a"], torch.ones(3))
        assert all(float(value.abs().max()) == 0 for value in (*motion.first.values(), *motion.second.values()))


@given(steps=st.integers(1, 500), momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_length_is_how_far_a_constant_gradient_goes(steps: int, momentum: float) -> None:
    pace, length = 0.0, 0.0
    for _ in range(steps):
        pace = momentum * pace + 1
        length += pace
    got = Optimiser("sgd", momentum).length(torch.tensor(float(steps), dtype=torch.float64), 0.01)
    assert float(got) == pytest.approx(0.01 * length, rel=1e-9)


def test_the_length_in_the_notes() -> None:
    assert float(Optimiser("sgd", 0.9).length(torch.tensor(400.0), 0.01)) == pytest.approx(39.1, abs=1e-3)


def test_clip() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    clipped = clip(grads, 1.0)
    assert float(clipped["a"]) == pytest.approx(0.6, rel=1e-5) and float(clipped["b"]) == pytest.approx(0.8, rel=1e-5)
    assert float(clip(grads, 10.0)["a"]) == 3.0
