"""Tests of Triton kernels against float64, on a GPU or in Triton's interpreter."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from fedcog.models.ops.augmentation import PADDING, gather_inputs
from fedcog.models.ops.kernels import augmentation, launchers, matmul
from fedcog.models.ops.kernels.shapes import Blocks, Shape, block_choices

pytestmark = pytest.mark.compiler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = {
    "output": [Blocks(64, 8, 1, 4, 0), Blocks(64, 16, 16, 4, 2)],
    "input": [Blocks(64, 8, 1, 4, 0), Blocks(64, 16, 16, 4, 2)],
    "weight": [Blocks(32, 16, 32, 4, 2), Blocks(16, 8, 64, 4, 3)],
}


def random_shape(seed: int, stride: int | None = None) -> Shape:
    n = random.Random(seed).randint
    sizes = (n(1, 3), n(1, 4), n(1, 5), n(9, 13), n(9, 13), n(1, 9), n(1, 4), n(1, 4))
    pairs = [(stride or n(1, 3), stride or n(1, 3)), (n(0, 2), n(0, 2)), (n(1, 2), n(1, 2))]
    return Shape(*sizes, *pairs)


def reference(s: Shape) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """float32 arguments and float64 expected results, by kind of product."""
    generator = torch.Generator().manual_seed(sum(s[:8]))
    x = torch.randn(s[:5], generator=generator)
    w = torch.randn(s.models, s.outputs, s.channels, s.rows, s.columns, generator=generator)
    exact_x = x.double().requires_grad_()
    exact_w = w.double().requires_grad_()
    y = torch.stack([F.conv2d(*pair, None, *s[8:]) for pair in zip(exact_x, exact_w, strict=True)])
    g = torch.randn(y.shape, generator=generator)
    x_grad, w_grad = torch.autograd.grad(y, (exact_x, exact_w), g.double())
    arguments = {"output": (x, w), "input": (g, w), "weight": (g, x)}
    return arguments, {"output": y.detach(), "input": x_grad, "weight": w_grad}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_match_float64(seed: int, kind: str) -> None:
    s = random_shape(seed, 1 if seed % 2 else None)
    arguments, expected = reference(s)
    left, right = (value.to(DEVICE) for value in arguments[kind])
    for blocks in BLOCKS[kind]:
        if kind == "input" and not blocks.stages and not s.is_transposable:
            continue
        actual = launchers.LAUNCHERS[kind](left, right, s, blocks, False)
        assert relative_error(actual, expected[kind]) < 1e-6, (s, blocks)


@pytest.mark.parametrize("kind", BLOCKS)
def test_kernels_accept_tensors_shared_by_models(kind: str) -> None:
    s = random_shape(5, 1)._replace(models=3)
    arguments, _ = reference(s)
    left, right = (value[:1].expand_as(value).to(DEVICE) for value in arguments[kind])
    left = left[:1].expand_as(left)
    right = right[:1].expand_as(right)
    assert left.stride(0) == 0 == right.stride(0)
    for blocks in BLOCKS[kind]:
        shared = launchers.LAUNCHERS[kind](left, right, s, blocks, False)
        copied = launchers.LAUNCHERS[kind](left.contiguous(), right.contiguous(), s, blocks, False)
        assert torch.equal(shared, copied)


@pytest.mark.parametrize("max_elements", [2**28, 500])
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("seed", range(6))
def test_matmul_convolution_matches_float64(
    seed: int, kind: str, max_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 500 elements are so few that the models take turns.
    monkeypatch.setattr(matmul, "MAX_COLUMN_ELEMENTS", max_elements)
    s = random_shape(seed, 1 if seed % 2 else None)
    if seed == 4:
        s = s._replace(models=1, batch=4)
    arguments, expected = reference(s)
    left, right = (value.to(DEVICE) for value in arguments[kind])
    assert relative_error(matmul.convolve_by_matmul(kind, left, right, s), expected[kind]) < 1e-6, s


@pytest.mark.parametrize("kind", BLOCKS)
def test_matmul_convolution_accepts_tensors_shared_by_models(kind: str) -> None:
    s = random_shape(5, 1)._replace(models=3)
    arguments, _ = reference(s)
    left, right = (value.to(DEVICE)[:1].expand_as(value) for value in arguments[kind])
    shared = matmul.convolve_by_matmul(kind, left, right, s)
    assert torch.equal(
        shared, matmul.convolve_by_matmul(kind, left.contiguous(), right.contiguous(), s)
    )


def test_only_a_single_models_batch_is_split_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Shape(1, 12, 2, 5, 5, 3, 3, 3, (1, 1), (0, 0), (1, 1))
    monkeypatch.setattr(matmul, "MAX_COLUMN_ELEMENTS", 2 * 9 * 9 * 3)  # room for three examples
    assert (
        matmul.fits_in_memory("output", s)
        and matmul.fits_in_memory("input", s)
        and not matmul.fits_in_memory("weight", s)
    )
    assert not matmul.fits_in_memory("output", s._replace(models=2))
    assert not matmul.fits_in_memory("output", s._replace(batch=13))


SHAPES = {
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


@pytest.mark.parametrize("name", SHAPES)
def test_every_block_choice_matches_float64(name: str) -> None:
    s = SHAPES[name]
    arguments, expected = reference(s)
    for kind, (left, right) in arguments.items():
        choices = block_choices(kind, s)
        assert choices
        for blocks in choices:
            actual = launchers.LAUNCHERS[kind](left.to(DEVICE), right.to(DEVICE), s, blocks, False)
            assert relative_error(actual, expected[kind]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_give_sixteen_bit_outputs(dtype: torch.dtype) -> None:
    s = Shape(2, 3, 3, 9, 9, 6, 3, 3, (1, 1), (1, 1), (1, 1))
    arguments, expected = reference(s)
    for kind, (left, right) in arguments.items():
        blocks = BLOCKS[kind][0]
        if DEVICE == "cpu" and dtype == torch.bfloat16 and blocks.stages:
            continue  # the interpreter reads bfloat16 as an integer
        inputs = (left.to(DEVICE, dtype), right.to(DEVICE, dtype))
        for actual in (
            launchers.LAUNCHERS[kind](*inputs, s, blocks, False),
            matmul.convolve_by_matmul(kind, *inputs, s),
        ):
            assert actual.dtype == dtype
            assert relative_error(actual, expected[kind]) < 2e-2


@pytest.mark.parametrize("normalize", [True, False])
def test_cropped_images_match_torch(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (20, 3, 7, 9), dtype=torch.uint8, generator=generator)
    index = torch.randint(0, 20, (2, 6), generator=generator)
    shift = torch.randint(0, 2 * PADDING + 1, (2, 6, 2), generator=generator)
    crops = torch.cat([shift, torch.randint(0, 2, (2, 6, 1), generator=generator)], dim=-1)
    mean = torch.tensor([0.1, 0.5, 0.7] if normalize else []).reshape(-1, 1, 1)
    std = torch.tensor([0.2, 0.3, 0.4] if normalize else []).reshape(-1, 1, 1)
    expected = gather_inputs(stored, index, crops, mean, std)
    arguments = (value.to(DEVICE) for value in (stored, index, crops, mean, std))
    assert (
        float((augmentation.cropped_images(*arguments, PADDING).cpu() - expected).abs().max())
        < 1e-6
    )
