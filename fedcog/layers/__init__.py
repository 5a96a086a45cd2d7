"""Layers of many models at once. Within `Layers`, a network mapped over models by vmap convolves, pools and normalises
in ways that take the models side by side; it is not rewritten for it, and of one model it computes the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fedcog.layers.convolution import convolution
from fedcog.layers.pooling import TAPS, max_pool
from fedcog.layers.rows import even

Ints = Sequence[int]


class Layers(TorchFunctionMode):
    """Within it, 2-d convolutions of one group, max pooling and batch normalisation are ours, however they are called.

    Running statistics are not written over: what becomes of each is found in `renewed`, by the id of the old tensor.
    If they are `steady`, what linear layers and convolutions make of an example is the same to the last bit however
    many there are beside it.
    """

    def __init__(self, steady: bool = False) -> None:
        super().__init__()
        self.steady = steady
        self.renewed: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any call of torch."""
        if func is torch.conv2d:
            return _conv2d(self.steady, *args, **(kwargs or {}))
        if func is F.linear and self.steady:
            return _linear(*args, **(kwargs or {}))
        if func in (F.max_pool2d, torch.max_pool2d) and _traced() and not _forward_mode():
            return _max_pool2d(func, *args, **(kwargs or {}))  # eagerly, torch's one kernel is the faster
        if func is F.batch_norm:
            return _batch_norm(self.renewed, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer that is steady: a convolution of images of one pixel, or a product that leaves nothing over."""
    plain = input.dim() > 0 and weight.dim() == 2 and 0 < input.shape[-1] == weight.shape[1]
    if not plain or not (bias is None or bias.shape == weight.shape[:1]):
        return F.linear(input, weight, bias)  # which knows more, or says what is wrong
    rows = input.reshape(-1, input.shape[-1])
    if _worthwhile(input):
        made = _conv2d(True, rows[:, :, None, None], weight[:, :, None, None], bias)[:, :, 0, 0]
    else:
        made = F.linear(even(rows), even(weight), None if bias is None else even(bias[None])[0])
        made = made[: len(rows), : len(weight)].contiguous()  # as torch's own: somebody may look at it as another shape
    return made.reshape(*input.shape[:-1], len(weight))


def _conv2d(
    steady: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Ints = 1,
    padding: int | Ints | str = 0,
    dilation: int | Ints = 1,
    groups: int = 1,
) -> Tensor:
    padding = 0 if padding == "valid" else padding
    reduced = torch.is_autocast_enabled(input.device.type)
    fits = bias is None or (bias.shape == weight.shape[:1] and (reduced or bias.dtype == weight.dtype))
    if steady and fits and not _worthwhile(input) and _pixel_by_pixel(input, weight, stride, padding, dilation, groups):
        return _linear(input.movedim(1, -1), weight[:, :, 0, 0], bias).movedim(-1, 1).contiguous()
    if groups != 1 or isinstance(padding, str) or input.dim() != 4 or not fits or not _worthwhile(input):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if reduced:  # torch's own would do so by itself
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight = input.to(dtype), weight.to(dtype)
    y = convolution(input, weight, _pair(stride), _pair(padding), _pair(dilation), steady)
    return y if bias is None else y + bias[:, None, None]


def _pixel_by_pixel(
    input: Tensor, weight: Tensor, stride: int | Ints, padding: int | Ints | str, dilation: int | Ints, groups: int
) -> bool:
    """Is a convolution a matrix product of every pixel's channels, and nothing that torch would refuse?"""
    single = groups == 1 and weight.shape[2:] == (1, 1) and _pair(stride) == _pair(dilation) == [1, 1]
    whole = padding == "same" or (not isinstance(padding, str) and not any(_pair(padding)))
    return single and whole and input.dim() == 4 and input.shape[1] == weight.shape[1] and input[0].numel() > 0


def _max_pool2d(func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:
    window = _tiles(*args, **kwargs)
    if window is None or input.dim() not in (3, 4) or input.shape[-2] < window[0] or input.shape[-1] < window[1]:
        return func(input, *args, **kwargs)
    return max_pool(input, *window)


def _tiles(
    kernel_size: int | Ints,
    stride: int | Ints | None = None,
    padding: int | Ints = 0,
    dilation: int | Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> list[int] | None:
    """Rows and columns of pooling's windows, if they tile the image and are small enough for a compiler to unroll."""
    rows, columns = _pair(kernel_size)
    simple = not any(_pair(padding)) and _pair(dilation) == [1, 1] and not ceil_mode and not return_indices
    tiles = not stride or _pair(stride) == [rows, columns]
    return [rows, columns] if simple and tiles and rows * columns <= TAPS else None


def _worthwhile(input: Tensor) -> bool:
    """Is there a kernel of ours to gain from? On a CPU there is none, and rules in Python cost more than torch's."""
    return (input.is_cuda or _traced()) and not _forward_mode()


def _traced() -> bool:
    """Is what happens written down rather than computed?"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _forward_mode() -> bool:
    """Is somebody differentiating in forward mode, for which torch's own layers have rules and ours have none?"""
    return forward_ad._current_level >= 0


def _pair(value: int | Ints) -> list[int]:
    both = [value] if isinstance(value, int) else [int(one) for one in value]
    return both * 2 if len(both) == 1 else both


def _batch_norm(
    renewed: dict[int, Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalisation in plain operators: torch's own loses its running statistics when it is traced under vmap."""
    given = input.dtype
    input = input.float() if given in (torch.bfloat16, torch.float16) else input  # as the statistics are
    if not training or input.numel() <= input.shape[1]:  # of one value a channel torch complains
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps).to(given)
    over = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // input.shape[1]
    mean, middle = input.mean(over), input.mean(over, keepdim=True)
    variance = (input - middle).square().mean(over)
    if running_mean is not None and running_var is not None:
        unbiased = variance.detach() * (count / (count - 1))
        for old, new in ((running_mean, mean.detach()), (running_var, unbiased)):
            now = renewed.get(id(old), old)  # the layer may be called more than once
            renewed[id(old)] = now + momentum * (new - now)
    shape = [1, -1, *[1] * (input.dim() - 2)]
    normal = (input - middle) * (variance + eps).rsqrt().reshape(shape)
    normal = normal if weight is None else normal * weight.reshape(shape)
    return (normal if bias is None else normal + bias.reshape(shape)).to(given)
