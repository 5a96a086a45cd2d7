"""Convolution that is one operator for all models when it is mapped over models by vmap."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedcog.models.ops.operators import convolve, convolve_input, convolve_weight

Ints = Sequence[int]


def convolution(
    x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints, batch_invariant: bool = False
) -> Tensor:
    """Convolve images.

    Args:
        x: Images `(N, C, H, W)`.
        w: Weights `(O, C, R, S)`.
        stride: Stride of rows and columns.
        padding: Padding of rows and columns.
        dilation: Dilation of rows and columns.
        batch_invariant: Whether results for an image must not depend on N, to the last bit.

    Returns:
        Images `(N, O, P, Q)`.
    """
    return _apply(Convolve, x, w, stride, padding, dilation, batch_invariant)


def _apply(function: Any, *args: Any) -> Tensor:
    """Call `apply` of an autograd function, which has no type annotations."""
    result: Tensor = function.apply(*args)
    return result


# Each of the three functions is linear in both operands, and its gradients are the other two.


class _ConvolutionFunction(torch.autograd.Function):
    """What the three functions have in common."""

    operator: Any
    # With a second operand common to all models, they are one model with a larger batch.
    folds_into_batch = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands and the geometry.

        Args:
            ctx: Context of the call.
            inputs: Arguments of `forward`.
            output: Result of `forward`.
        """
        left, right, *ctx.geometry = inputs
        ctx.save_for_backward(left, right)

    @classmethod
    def _single_model(cls, left: Tensor, right: Tensor, *geometry: Any) -> Tensor:
        result: Tensor = cls.operator(left[None], right[None], *geometry)
        return result[0]

    @classmethod
    def _map_models(
        cls, info: Any, dims: tuple[int | None, ...], left: Tensor, right: Tensor, *geometry: Any
    ) -> tuple[Tensor, int]:
        if cls.folds_into_batch and dims[0] is not None and dims[1] is None:
            stacked = left.movedim(dims[0], 0)
            result = _apply(cls, stacked.flatten(0, 1), right, *geometry)
            return result.reshape(*stacked.shape[:2], *result.shape[1:]), 0
        left, right = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in ((left, dims[0]), (right, dims[1]))
        )
        return cls.operator(left, right, *geometry), 0


class Convolve(_ConvolutionFunction):
    """`convolve` of one model, differentiable and mappable."""

    operator = convolve

    @staticmethod
    def forward(*args: Any) -> Tensor:
        """Apply the operator to one model."""
        return Convolve._single_model(*args)

    @staticmethod
    def vmap(*args: Any) -> tuple[Tensor, int]:
        """Apply the operator to all models."""
        return Convolve._map_models(*args)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        """Compute the gradients with respect to input and weight.

        Args:
            ctx: Context of the call.
            g: Gradient with respect to the output.

        Returns:
            One gradient per argument; None where there is none.
        """
        x, w = ctx.saved_tensors
        geometry = ctx.geometry
        grad_x = None
        grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _apply(ConvolveInput, g, w, x.shape[-2:], *geometry)
        if ctx.needs_input_grad[1]:
            grad_w = _apply(ConvolveWeight, g, x, w.shape[-2:], *geometry)
        return grad_x, grad_w, None, None, None, None


class ConvolveInput(_ConvolutionFunction):
    """`convolve_input` of one model, differentiable and mappable."""

    operator = convolve_input

    @staticmethod
    def forward(*args: Any) -> Tensor:
        """Apply the operator to one model."""
        return ConvolveInput._single_model(*args)

    @staticmethod
    def vmap(*args: Any) -> tuple[Tensor, int]:
        """Apply the operator to all models."""
        return ConvolveInput._map_models(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute the gradients with respect to the output's gradient and the weight.

        Args:
            ctx: Context of the call.
            grad: Gradient with respect to the result.

        Returns:
            One gradient per argument; None where there is none.
        """
        g, w = ctx.saved_tensors
        _, *geometry = ctx.geometry
        grad_g = None
        grad_w = None
        if ctx.needs_input_grad[0]:
            grad_g = _apply(Convolve, grad, w, *geometry)
        if ctx.needs_input_grad[1]:
            grad_w = _apply(ConvolveWeight, g, grad, w.shape[-2:], *geometry)
        return grad_g, grad_w, None, None, None, None, None


class ConvolveWeight(_ConvolutionFunction):
    """`convolve_weight` of one model, differentiable and mappable."""

    operator = convolve_weight
    folds_into_batch = False

    @staticmethod
    def forward(*args: Any) -> Tensor:
        """Apply the operator to one model."""
        return ConvolveWeight._single_model(*args)

    @staticmethod
    def vmap(*args: Any) -> tuple[Tensor, int]:
        """Apply the operator to all models."""
        return ConvolveWeight._map_models(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute the gradients with respect to the output's gradient and the input.

        Args:
            ctx: Context of the call.
            grad: Gradient with respect to the result.

        Returns:
            One gradient per argument; None where there is none.
        """
        g, x = ctx.saved_tensors
        _, *geometry = ctx.geometry
        grad_g = None
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_g = _apply(Convolve, x, grad, *geometry)
        if ctx.needs_input_grad[1]:
            grad_x = _apply(ConvolveInput, g, grad, x.shape[-2:], *geometry)
        return grad_g, grad_x, None, None, None, None, None
