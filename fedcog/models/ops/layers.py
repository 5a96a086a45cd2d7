"""Replacements of torch's layers that are efficient for many models at once.

Within `LayerOverrides`, a network that is mapped over models by vmap convolves, pools and
normalizes all models at once. The network itself is not changed, and a single model computes the
same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fedcog.models.ops.batch_invariant import pad_matrix
from fedcog.models.ops.convolution import convolution
from fedcog.models.ops.pooling import MAX_WINDOW_SIZE, max_pool

Ints = Sequence[int]


class LayerOverrides(TorchFunctionMode):
    """A context that replaces 2-d convolutions without groups, max pooling, BatchNorm and RNNs.

    Attributes:
        batch_invariant: Whether linear layers and convolutions give the same result for an example
            at all batch sizes, to the last bit.
        updated_buffers: Running statistics after the calls, by the id of the old tensor, which is
            not written to.
    """

    def __init__(self, batch_invariant: bool = False) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self.updated_buffers: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, or its replacement."""
        kwargs = kwargs or {}
        if func is torch.conv2d:
            return _conv2d(self.batch_invariant, *args, **kwargs)
        if func is F.linear and self.batch_invariant:
            return _linear(*args, **kwargs)
        # Without a compiler, torch's single kernel is faster.
        is_pooling = func in (F.max_pool2d, torch.max_pool2d)
        if is_pooling and _is_tracing() and not _is_forward_mode():
            return _max_pool2d(func, *args, **kwargs)
        if func in _RECURRENT:
            return _recurrent(func, *args)
        if func is F.batch_norm:
            return _batch_norm(self.updated_buffers, *args, **kwargs)
        return func(*args, **kwargs)


class ConvGeometry(NamedTuple):
    """The optional arguments of torch.conv2d after the bias."""

    stride: int | Ints = 1
    padding: int | Ints | str = 0
    dilation: int | Ints = 1
    groups: int = 1


class BatchNormOptions(NamedTuple):
    """The optional arguments of F.batch_norm."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer that is batch invariant: as a 1x1 convolution, or with padding."""
    is_plain = input.dim() > 0 and weight.dim() == 2 and 0 < input.shape[-1] == weight.shape[1]
    if not is_plain or not (bias is None or bias.shape == weight.shape[:1]):
        return F.linear(input, weight, bias)  # handles other cases, or raises
    rows = input.reshape(-1, input.shape[-1])
    if _has_kernel(input):
        pixels = _conv2d(True, rows[:, :, None, None], weight[:, :, None, None], bias)
        output = pixels[:, :, 0, 0]
    else:
        padded_bias = None if bias is None else pad_matrix(bias[None])[0]
        padded = F.linear(pad_matrix(rows), pad_matrix(weight), padded_bias)
        # Contiguous as torch's result: a network may call `view` on it.
        output = padded[: len(rows), : len(weight)].contiguous()
    return output.reshape(*input.shape[:-1], len(weight))


def _conv2d(
    batch_invariant: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Apply torch.conv2d, by the operator for many models where it applies."""
    geometry = ConvGeometry(*args, **kwargs)
    if geometry.padding == "valid":
        geometry = geometry._replace(padding=0)
    stride, padding, dilation, groups = geometry
    has_kernel = _has_kernel(input)
    is_autocast = torch.is_autocast_enabled(input.device.type)
    is_bias_valid = bias is None or (
        bias.shape == weight.shape[:1] and (is_autocast or bias.dtype == weight.dtype)
    )
    if batch_invariant and is_bias_valid and not has_kernel and _is_1x1(input, weight, geometry):
        return _linear(input.movedim(1, -1), weight[:, :, 0, 0], bias).movedim(-1, 1).contiguous()
    is_supported = groups == 1 and input.dim() == 4 and is_bias_valid and has_kernel
    if not is_supported or isinstance(padding, str):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if is_autocast:  # torch's own convolution would convert its operands
        dtype = torch.get_autocast_dtype(input.device.type)
        input = input.to(dtype)
        weight = weight.to(dtype)
    pairs = (_pair(stride), _pair(padding), _pair(dilation))
    y = convolution(input, weight, *pairs, batch_invariant)
    return y if bias is None else y + bias[:, None, None]


def _is_1x1(input: Tensor, weight: Tensor, geometry: ConvGeometry) -> bool:
    """Whether a valid convolution is a matrix product of each pixel's channels."""
    stride, padding, dilation, groups = geometry
    if groups != 1 or weight.shape[2:] != (1, 1):
        return False
    if not _pair(stride) == _pair(dilation) == [1, 1]:
        return False
    is_unpadded = padding == "same" or (not isinstance(padding, str) and not any(_pair(padding)))
    if not is_unpadded or input.dim() != 4:
        return False
    return input.shape[1] == weight.shape[1] and input[0].numel() > 0


def _max_pool2d(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply max pooling in plain operators where windows tile the image."""
    window = _tiling_window(*args, **kwargs)
    if window is None or input.dim() not in (3, 4):
        return func(input, *args, **kwargs)
    if input.shape[-2] < window[0] or input.shape[-1] < window[1]:
        return func(input, *args, **kwargs)
    return max_pool(input, *window)


def _tiling_window(
    kernel_size: int | Ints,
    stride: int | Ints | None = None,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> list[int] | None:
    """Return rows and columns of a window, if windows tile the image and are small."""
    rows, columns = _pair(kernel_size)
    if any(_pair(padding)) or _pair(dilation) != [1, 1] or ceil_mode or return_indices:
        return None
    is_tiling = not stride or _pair(stride) == [rows, columns]
    return [rows, columns] if is_tiling and rows * columns <= MAX_WINDOW_SIZE else None


def _has_kernel(input: Tensor) -> bool:
    """Whether the operator for many models is worthwhile: it has no faster kernel on a CPU."""
    return (input.is_cuda or _is_tracing()) and not _is_forward_mode()


def _is_tracing() -> bool:
    """Whether operators are recorded rather than computed."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _is_forward_mode() -> bool:
    """Whether forward-mode differentiation is active, which only torch's own layers support."""
    return forward_ad._current_level >= 0


def _pair(value: int | Ints) -> list[int]:
    values = [value] if isinstance(value, int) else [int(element) for element in value]
    return values * 2 if len(values) == 1 else values


def _recurrent(func: Callable[..., Any], *args: Any) -> Any:
    """Run a recurrent layer in plain operators: vmap has no rules for torch's own.

    A packed sequence, whose fourth argument is its weights, is left to torch.
    """
    if not isinstance(args[3], bool):
        return func(*args)
    overload = _RECURRENT[func]
    with _without_onednn():
        return torch._decomp.get_decompositions([overload])[overload](*args)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Switch oneDNN off, whose LSTM has no rule for vmap either.

    The context manager of torch prints a warning about GPUs of another maker.
    """
    onednn: Any = torch.backends.mkldnn
    was_enabled = onednn.enabled
    onednn.enabled = False
    try:
        yield
    finally:
        onednn.enabled = was_enabled


_RECURRENT = {
    torch.lstm: torch.ops.aten.lstm.input,
    torch.gru: torch.ops.aten.gru.input,
    torch.rnn_tanh: torch.ops.aten.rnn_tanh.input,
    torch.rnn_relu: torch.ops.aten.rnn_relu.input,
}


def _batch_norm(
    updated_buffers: dict[int, Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Apply F.batch_norm in plain operators: torch's own loses statistics traced under vmap."""
    options = BatchNormOptions(*args, **kwargs)
    dtype = input.dtype
    if dtype in (torch.bfloat16, torch.float16):  # statistics are float32
        input = input.float()
    # With one value per channel, torch raises an error.
    if not options.training or input.numel() <= input.shape[1]:
        return F.batch_norm(input, running_mean, running_var, *options).to(dtype)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // input.shape[1]
    mean = input.mean(dims)
    mean_kept = input.mean(dims, keepdim=True)
    variance = (input - mean_kept).square().mean(dims)
    if running_mean is not None and running_var is not None:
        unbiased = variance.detach() * (count / (count - 1))
        for buffer, batch_value in ((running_mean, mean.detach()), (running_var, unbiased)):
            current = updated_buffers.get(id(buffer), buffer)  # a layer may be called repeatedly
            change = options.momentum * (batch_value - current)
            updated_buffers[id(buffer)] = current + change
    shape = [1, -1, *[1] * (input.dim() - 2)]
    output = (input - mean_kept) * (variance + options.eps).rsqrt().reshape(shape)
    if options.weight is not None:
        output = output * options.weight.reshape(shape)
    if options.bias is not None:
        output = output + options.bias.reshape(shape)
    return output.to(dtype)
