"""Tests of what users are told whose algorithm cannot run for several clients at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog import Algorithm, ModelError
from fedcog.testing import NUM_CLASSES, ToyFederation
from tests.engine.test_cuda_graphs import TracedGraphCache


@dataclass(frozen=True)
class OneHot(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        target = F.one_hot(batch["y"], NUM_CLASSES)
        return (outputs["logits"] - target).square().mean()


@dataclass(frozen=True)
class Mask(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        logits = outputs["logits"]
        return logits[logits.argmax(-1) != batch["y"]].sum()


@dataclass(frozen=True)
class Condition(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        if outputs["logits"].mean() > 0:
            return outputs["logits"].mean()
        return outputs["logits"].sum()


@dataclass(frozen=True)
class Rows(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        rows = torch.nonzero(batch["y"] == 1)
        return outputs["logits"][rows].sum()


@dataclass(frozen=True)
class InPlace(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        total = torch.zeros(NUM_CLASSES, dtype=client.lr.dtype)
        total += outputs["logits"].mean(0)
        return total.sum()


@dataclass(frozen=True)
class Noise(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        noise = torch.randn_like(outputs["logits"])
        return (outputs["logits"] * noise).mean()


@dataclass(frozen=True)
class InNumPy(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        share = np.mean(batch["y"].numpy())
        return outputs["logits"].mean() * share


@dataclass(frozen=True)
class WrongShape(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        return (outputs["logits"] @ torch.ones(3)).mean()


@dataclass(frozen=True)
class NumberOfARound(Algorithm):
    def penalty(self, params, outputs, batch, client):  # type: ignore[no-untyped-def]
        return outputs["logits"].mean() * client.round.item()


CASES: dict[type[Algorithm], tuple[str, str]] = {
    OneHot: ("target = F.one_hot(", "torch.arange(num_classes"),
    Mask: ("return logits[logits.argmax", "torch.where(mask, value, 0).sum() / mask.sum()"),
    Condition: ('if outputs["logits"].mean() > 0:', "torch.where(condition, a, b)"),
    Rows: ("rows = torch.nonzero(", "torch.where(condition, value, 0)"),
    InPlace: ("total += outputs", "total = total + value"),
    Noise: ("noise = torch.randn_like(", "request_draws"),
    InNumPy: ("share = np.mean(", "torch's own functions"),
}


def run(algorithm: Algorithm, is_traced: bool) -> None:
    toy = ToyFederation(algorithm, "vmap", rounds=1)
    if is_traced:
        toy.simulator.cohort._repeat = TracedGraphCache().repeat
    toy.run()


@pytest.mark.parametrize("is_traced", [False, True], ids=["vmap", "recorded"])
@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_error_names_line_operation_and_remedy(cls: type[Algorithm], is_traced: bool) -> None:
    source, instead = CASES[cls]
    with pytest.raises(ModelError) as caught:
        run(cls(), is_traced)
    message = str(caught.value)
    lines = Path(__file__).read_text().splitlines()
    number = next(row for row, line in enumerate(lines, 1) if line.strip().startswith(source))
    assert f"test_batching_errors.py, line {number}, in penalty" in message
    assert source in message and instead in message
    assert ("set --mapping loop" in message) == (cls is not Noise)


def test_what_it_advises_for_one_hot_runs() -> None:
    @dataclass(frozen=True)
    class Compared(Algorithm):
        def penalty(self, params: Any, outputs: Any, batch: Any, client: Any) -> Tensor:
            labels = batch["y"]
            classes = torch.arange(NUM_CLASSES, device=labels.device)
            target = (labels[:, None] == classes).to(client.lr.dtype)
            loss: Tensor = (outputs["logits"] - target).square().mean()
            return loss

    for is_traced in (False, True):
        run(Compared(), is_traced)


def test_value_that_only_recording_cannot_read_is_explained() -> None:
    """Every client has the same round, so vmap can read it, but a recorded step cannot."""
    run(NumberOfARound(), is_traced=False)
    with pytest.raises(ModelError, match=r"client.round.item\(\)(.|\n)*tensor arithmetic"):
        run(NumberOfARound(), is_traced=True)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        run(WrongShape(), is_traced=False)
    assert not isinstance(caught.value, ModelError)
