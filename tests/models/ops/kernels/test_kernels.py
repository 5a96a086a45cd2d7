"""Triton kernels against float64: on a GPU, or else in Triton's interpreter."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from fedcog.models.ops.images import PADDING, gather_inputs
from fedcog.models.ops.kernels import images, launchers, matmul
from fedcog.models.ops.kernels.shapes import Blocks, Shape, block_choices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {
    "output": [Blocks(64, 8, 1, 4, 0), Blocks(64, 16, 16, 4, 2)],
    "input": [Blocks(64, 8, 1, 4, 0), Blocks(64, 16, 16, 4, 2)],
    "weight": [Blocks(32, 16, 32, 4, 2), Blocks(16, 8, 64, 4, 3)],
}


def shape(seed: int, stride: int | None = None) -> Shape:
    draw = random.Random(seed)
    n = draw.randint
    sizes = n(1, 3), n(1, 4), n(1, 5), n(9, 13), n(9, 13), n(1, 9), n(1, 4), n(1, 4)
    pairs = [(stride or n(1, 3), stride or n(1, 3)), (n(0, 2), n(0, 2)), (n(1, 2), n(1, 2))]
    return Shape(*sizes, *pairs)


def reference(s: Shape) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Arguments by kind in float32, and what must come out, in float64."""
    draw = torch.Generator().manual_seed(sum(s[:8]))
    x = torch.randn(s[:5], generator=draw)
    w = torch.randn(s.models, s.outputs, s.channels, s.rows, s.columns, generator=draw)
    exact_x = x.double().requires_grad_()
    exact_w = w.double().requires_grad_()
    y = torch.stack([F.conv2d(*both, None, *s[8:]) for both in zip(exact_x, exact_w, strict=True)])
    g = torch.randn(y.shape, generator=draw)
    by_x, by_w = torch.autograd.grad(y, (exact_x, exact_w), g.double())
    given = {"output": (x, w), "input": (g, w), "weight": (g, x)}
    return given, {"output": y.detach(), "input": by_x, "weight": by_w}


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_agree_with_float64(seed: int, kind: str) -> None:
    s = shape(seed, 1 if seed % 2 else None)
    given, wanted = reference(s)
    one, other = (value.to(DEVICE) for value in given[kind])
    for blocks in WAYS[kind]:
        if kind == "input" and not blocks.stages and not s.is_transposable:
            continue
        found = launchers.LAUNCHERS[kind](one, other, s, blocks, False)
        assert apart(found, wanted[kind]) < 1e-6, (s, blocks)


@pytest.mark.parametrize("kind", WAYS)
def test_what_models_share_need_not_be_copied(kind: str) -> None:
    s = shape(5, 1)._replace(models=3)
    given, _ = reference(s)
    one, other = (value[:1].expand_as(value).to(DEVICE) for value in given[kind])
    one = one[:1].expand_as(one)
    other = other[:1].expand_as(other)
    assert one.stride(0) == 0 == other.stride(0)
    for blocks in WAYS[kind]:
        shared = launchers.LAUNCHERS[kind](one, other, s, blocks, False)
        copied = launchers.LAUNCHERS[kind](one.contiguous(), other.contiguous(), s, blocks, False)
        assert torch.equal(shared, copied)


@pytest.mark.parametrize("room", [2**28, 500])
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("seed", range(6))
def test_products_of_columns_agree_with_float64(
    seed: int, kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "MAX_COLUMN_ELEMENTS", room)  # so small that models take turns
    s = shape(seed, 1 if seed % 2 else None)
    s = s._replace(models=1, batch=4) if seed == 4 else s
    given, wanted = reference(s)
    one, other = (value.to(DEVICE) for value in given[kind])
    assert apart(matmul.convolve_by_matmul(kind, one, other, s), wanted[kind]) < 1e-6, s


@pytest.mark.parametrize("kind", WAYS)
def test_products_take_what_models_share(kind: str) -> None:
    s = shape(5, 1)._replace(models=3)
    given, _ = reference(s)
    one, other = (value.to(DEVICE)[:1].expand_as(value) for value in given[kind])
    shared = matmul.convolve_by_matmul(kind, one, other, s)
    assert torch.equal(
        shared, matmul.convolve_by_matmul(kind, one.contiguous(), other.contiguous(), s)
    )


def test_columns_of_one_large_batch_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Shape(1, 12, 2, 5, 5, 3, 3, 3, (1, 1), (0, 0), (1, 1))
    monkeypatch.setattr(matmul, "MAX_COLUMN_ELEMENTS", 2 * 9 * 9 * 3)  # those of three examples
    assert (
        matmul.fits_in_memory("output", s)
        and matmul.fits_in_memory("input", s)
        and not matmul.fits_in_memory("weight", s)
    )
    assert not matmul.fits_in_memory("output", s._replace(models=2))
    assert not matmul.fits_in_memory("output", s._replace(batch=13))


OFFERED = {
    "few channels": Shape(2, 3, 3, 9, 9, 6, 3, 3, (1, 1), (1, 1), (1, 1)),
    "a weight of one block": Shape(2, 2, 3, 9, 9, 12, 5, 5, (1, 1), (0, 0), (1, 1)),
    "many channels": Shape(2, 2, 34, 5, 6, 40, 2, 3, (1, 1), (0, 1), (1, 2)),
    "many channels, strides": Shape(2, 2, 33, 6, 6, 35, 3, 3, (2, 2), (1, 1), (1, 1)),
    "by taps": Shape(2, 2, 64, 5, 6, 96, 2, 3, (1, 1), (0, 1), (1, 2)),
    "by taps, strides": Shape(2, 2, 64, 7, 6, 64, 3, 3, (2, 2), (1, 1), (1, 1)),
    "by taps, uneven strides": Shape(2, 1, 64, 8, 7, 32, 3, 2, (3, 2), (1, 0), (1, 1)),
    "one tap, strides": Shape(2, 3, 64, 5, 4, 128, 1, 1, (2, 2), (0, 0), (1, 1)),
    "taps that reach nothing": Shape(1, 2, 64, 5, 5, 64, 1, 2, (3, 3), (0, 1), (1, 1)),
    "many inputs' gradient of few": Shape(2, 2, 3, 9, 8, 64, 5, 5, (2, 2), (2, 2), (1, 1)),
}


@pytest.mark.parametrize("name", OFFERED)
def test_every_choice_offered_is_right(name: str) -> None:
    s = OFFERED[name]
    given, wanted = reference(s)
    for kind, (one, other) in given.items():
        offered = block_choices(kind, s)
        assert offered
        for blocks in offered:
            found = launchers.LAUNCHERS[kind](one.to(DEVICE), other.to(DEVICE), s, blocks, False)
            assert apart(found, wanted[kind]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_go_in_and_come_out(dtype: torch.dtype) -> None:
    s = Shape(2, 3, 3, 9, 9, 6, 3, 3, (1, 1), (1, 1), (1, 1))
    given, wanted = reference(s)
    for kind, (one, other) in given.items():
        blocks = WAYS[kind][0]
        if DEVICE == "cpu" and dtype == torch.bfloat16 and blocks.stages:
            continue  # the interpreter takes its bits for an integer
        short = one.to(DEVICE, dtype), other.to(DEVICE, dtype)
        for found in (
            launchers.LAUNCHERS[kind](*short, s, blocks, False),
            matmul.convolve_by_matmul(kind, *short, s),
        ):
            assert found.dtype == dtype
            assert apart(found, wanted[kind]) < 2e-2


@pytest.mark.parametrize("normal", [True, False])
def test_moved_images_are_those_of_plain_torch(normal: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (20, 3, 7, 9), dtype=torch.uint8, generator=draw)
    index = torch.randint(0, 20, (2, 6), generator=draw)
    shift = torch.randint(0, 2 * PADDING + 1, (2, 6, 2), generator=draw)
    moves = torch.cat([shift, torch.randint(0, 2, (2, 6, 1), generator=draw)], dim=-1)
    mean = torch.tensor([0.1, 0.5, 0.7] if normal else []).reshape(-1, 1, 1)
    std = torch.tensor([0.2, 0.3, 0.4] if normal else []).reshape(-1, 1, 1)
    wanted = gather_inputs(stored, index, moves, mean, std)
    given = (value.to(DEVICE) for value in (stored, index, moves, mean, std))
    assert float((images.cropped_images(*given, PADDING).cpu() - wanted).abs().max()) < 1e-6
