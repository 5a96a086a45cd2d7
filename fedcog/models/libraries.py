"""Networks of torchvision and timm by name, without pretrained weights, for inputs of any size."""

import difflib
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcog.models.checks import ModelError
from fedcog.models.initialization import initialize

LIBRARIES = ("torchvision", "timm")
"""Packages whose networks have names, such as `timm:resnet10t`."""
SIZES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256, 288, 320, 384, 448, 512)
"""Heights and widths in pixels that inputs are resized to, smallest first."""
NUM_TRIALS = 2
"""Number of inputs in a trial batch."""
_TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")
}
"""Further arguments of builders; auxiliary logits would be a second output."""
_TORCHVISION_SIZE_ARGUMENTS = {"vit_": "image_size"}
"""The argument of the image size, by the first letters of names that have one."""
_MISSING_OPERATOR = r"operator torchvision::\w+ does not exist"
_OPERATOR_SCHEMAS = ("nms", "qnms")
_libraries: list[torch.library.Library] = []
Result = TypeVar("Result")


class InputAdapter(nn.Module):
    """Turns inputs as the data set has them into inputs that a network takes.

    Images are resized bilinearly, by two matrix products: unlike torch's own operator, they have
    the same gradient in every run on a GPU. Matrices are not part of the network's weights.

    Attributes:
        note: What happens to inputs, in words.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, input_shape: tuple[int, ...], channels: int, size: tuple[int, int]) -> None:
        """Create an adapter.

        Args:
            input_shape: Shape of one input, `(C, H, W)`.
            channels: Number of channels that the network takes.
            size: Height and width that the network takes.
        """
        super().__init__()
        own_channels, height, width = input_shape
        self._repeats = channels // own_channels
        self._is_resized = (height, width) != size
        self.register_buffer("rows", _interpolation(height, size[0]), persistent=False)
        self.register_buffer("columns", _interpolation(width, size[1]), persistent=False)
        notes = []
        if self._is_resized:
            notes.append(f"inputs are resized from {height}x{width} to {size[0]}x{size[1]}")
        if self._repeats > 1:
            notes.append(f"the channel is repeated {self._repeats} times")
        self.note = ", and ".join(notes)

    def forward(self, x: Tensor) -> Tensor:
        """Adapt a batch of inputs.

        Args:
            x: Inputs `(B, C, H, W)`.

        Returns:
            What the network takes, `(B, C', H', W')`.
        """
        if self._is_resized:
            x = F.linear(x, self.columns)
            x = F.linear(x.mT, self.rows).mT.contiguous()
        return x.repeat(1, self._repeats, 1, 1)

    def extra_repr(self) -> str:
        """Return what happens to inputs, which is part of what identifies the network."""
        return self.note


def is_library_name(name: str) -> bool:
    """Return whether a name is of the form LIBRARY:NAME, whether or not that network exists."""
    library, _, rest = name.partition(":")
    return library in LIBRARIES and bool(rest)


def name_fault(name: str) -> str | None:
    """Return why a network of a library is not available.

    Args:
        name: Name of a network; names without a library are not checked.

    Returns:
        A message with a remedy, or None.
    """
    if not is_library_name(name):
        return None
    library, _, rest = name.partition(":")
    if importlib.util.find_spec(library) is None:
        return f"model '{name}' needs {library}: pip install 'fedcog[{library}]'."
    known = _listed_names(library)
    if rest in known:
        return None
    close = difflib.get_close_matches(rest, known, n=1)
    hint = f"{library}.list_models() returns all names."
    if library == "torchvision":
        hint = "torchvision.models.list_models(module=torchvision.models) returns all names."
    if close:
        hint = f"did you mean {library}:{close[0]}?"
    return f"unknown model '{name}': {hint}"


def build_from_library(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    """Build a network of a library with new weights, and adapt it to the inputs.

    Inputs keep their size if the network takes it. If not, they are resized up to the smallest of
    `SIZES` that it takes. torchvision's networks take three channels, so that of grayscale images
    is repeated. Parameters have the library's names.

    Args:
        name: Name of the network, such as `timm:resnet10t`.
        input_shape: Shape of one input, `(C, H, W)`.
        num_classes: Number of classes.
        seed: Seed of the initial weights.

    Returns:
        The network.

    Raises:
        ModelError: If there is no such network, or it does not take such inputs.
    """
    if fault := name_fault(name):
        raise ModelError(fault)
    if len(input_shape) != 3:
        raise ModelError(
            f"model '{name}' takes images of shape (C, H, W), not inputs of shape {input_shape}: "
            "choose mlp, or pass your own network."
        )
    library, _, rest = name.partition(":")
    channels = input_shape[0]
    if library == "torchvision":
        if channels not in (1, 3):
            raise ModelError(
                f"model '{name}' takes images of 1 or 3 channels, not {channels}: choose a network "
                "of timm, which takes any number."
            )
        channels = 3
    reason = "it takes none of the sizes"
    for size in _candidate_sizes(input_shape):
        try:
            with warnings.catch_warnings(action="ignore"):  # about sizes that are too small
                module = initialize(_builder(library, rest, channels, num_classes, size), seed)
                _try_size(module, channels, size)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        if (channels, *size) != tuple(input_shape):
            module.add_module("input_adapter", InputAdapter(input_shape, channels, size))
            module.register_forward_pre_hook(_adapt_inputs)
        return module
    raise ModelError(
        f"model '{name}' cannot be built for images of {input_shape[1]}x{input_shape[2]}, nor for "
        f"larger ones up to {SIZES[-1]}x{SIZES[-1]}: {reason}. Choose another network."
    )


def input_note(module: nn.Module) -> str:
    """Return how a network adapts its inputs, in words; empty if it takes them as they are."""
    adapter = getattr(module, "input_adapter", None)
    return adapter.note if isinstance(adapter, InputAdapter) else ""


def _adapt_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adapt a network's inputs before its forward pass: a hook changes no parameter's name."""
    adapter = module.get_submodule("input_adapter")
    return (adapter(inputs[0]), *inputs[1:])


def _interpolation(old: int, new: int) -> Tensor:
    """Return the matrix `(new, old)` that interpolates values linearly."""
    return F.interpolate(torch.eye(old)[None], size=new, mode="linear")[0].T.contiguous()


def _candidate_sizes(input_shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    height, width = input_shape[1:]
    yield height, width
    for size in SIZES:
        if size >= max(height, width) and (size, size) != (height, width):
            yield size, size


def _builder(
    library: str, name: str, channels: int, num_classes: int, size: tuple[int, int]
) -> Callable[[], nn.Module]:
    """Return a function that builds a network for a size of images."""
    if library == "torchvision":
        return lambda: _build_torchvision(name, num_classes, size)
    return lambda: _build_timm(name, channels, num_classes, size)


def _build_torchvision(name: str, num_classes: int, size: tuple[int, int]) -> nn.Module:
    options = dict(_TORCHVISION_OPTIONS.get(name, {}))
    for prefix, argument in _TORCHVISION_SIZE_ARGUMENTS.items():
        if name.startswith(prefix):
            if size[0] != size[1]:
                raise ValueError("it takes square images")
            options[argument] = size[0]
    models = import_library("torchvision").models
    module: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return module


def _build_timm(name: str, channels: int, num_classes: int, size: tuple[int, int]) -> nn.Module:
    timm = import_library("timm")
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    module: nn.Module
    if timm.models.get_pretrained_cfg(name).fixed_input_size:
        try:
            module = timm.create_model(name, pretrained=False, img_size=size, **options)
        except TypeError:  # its size cannot be chosen
            module = timm.create_model(name, pretrained=False, **options)
    else:
        module = timm.create_model(name, pretrained=False, **options)
    return module


def _try_size(module: nn.Module, channels: int, size: tuple[int, int]) -> None:
    """Run a network on a trial batch; an error means that it does not take this size.

    Raises:
        ValueError: If patches do not cover the image, or one patch is all of it.
    """
    patch = getattr(getattr(module, "patch_embed", module), "patch_size", None)
    if patch is not None:
        sides = patch if isinstance(patch, tuple | list) else (patch, patch)
        for length, side in zip(size, sides, strict=True):
            if length % side or length < 2 * side:
                raise ValueError(f"{length} pixels are no two or more patches of {side} pixels")
    was_training = module.training
    before = {name: value.clone() for name, value in module.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module.train()(torch.zeros(NUM_TRIALS, channels, *size))
        for name, value in module.named_buffers():
            value.copy_(before[name])
    module.train(was_training)


def _listed_names(library: str) -> list[str]:
    """Return the classification networks that a library lists."""
    package = import_library(library)
    if library == "torchvision":
        return list(package.models.list_models(module=package.models))
    return list(package.list_models())


def import_library(library: str) -> Any:
    """Import torchvision or timm, which imports torchvision.

    torchvision is imported even if it was built for another torch than this one.

    Args:
        library: Name of the package.

    Returns:
        The package.

    Raises:
        ModelError: If the package is broken.
    """
    try:
        _import_torchvision()
        return importlib.import_module(library)
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"{library} cannot be imported ({error}): install it again, "
            f"pip install --force-reinstall 'fedcog[{library}]'."
        ) from error


def call_with_torchvision(function: Callable[[], Result]) -> Result:
    """Call a function that may import a torchvision that was built for another torch.

    Args:
        function: The function; it is called again if that import failed.

    Returns:
        Its result.
    """
    try:
        return function()
    except RuntimeError as error:
        if not re.search(_MISSING_OPERATOR, str(error)):
            raise
        import_library("torchvision")
        return function()


def _import_torchvision() -> None:
    """Import torchvision, also if it was built for another torch than this one.

    Its compiled operators then do not load, and the import fails for lack of their declarations.
    Classification networks do not use them, so declarations are enough.
    """
    if "torchvision" in sys.modules:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if not re.search(_MISSING_OPERATOR, str(error)):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        fragment = torch.library.Library
        declarations = fragment("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for operator in _OPERATOR_SCHEMAS:
            schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            declarations.define(schema)  # type: ignore[no-untyped-call]
        _libraries.append(declarations)  # they last as long as this object
        importlib.import_module("torchvision")
