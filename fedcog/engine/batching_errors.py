"""Explanations of what a user's code does that cannot run for several clients at once."""

import re
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

import fedcog

WORDS = (
    "vmap",
    "functorch",
    "transform",
    "channels_last",
    "data-dependent",
    "data dependent",
    "symint",
    "symfloat",
)
"""Words in torch's errors about functions that it cannot batch or record."""
TYPES = {
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
    "PendingUnbackedSymbolNotFound",
}
"""Torch's exceptions about tensors whose values are not known while a step is recorded."""
IN_A_LOOP = (
    "Or set --mapping loop, which trains one client after another and is many times slower on a "
    "GPU."
)
NO_STORAGE = "doesn't have storage"
"""Part of the error about NumPy reading a tensor of several clients."""


class Remedy(NamedTuple):
    """What an operation does that prevents batching, and what to write instead."""

    pattern: str
    operation: str
    reason: str
    instead: str
    works_in_loop: bool = True


REMEDIES = (
    Remedy(
        r"\bone_hot\(",
        "one_hot",
        "reads the labels' values",
        "(labels[:, None] == torch.arange(num_classes, device=labels.device)).to(dtype)",
    ),
    Remedy(
        r"\b(randn?(_like)?|randint|randperm|multinomial|bernoulli|normal_?|dropout)\(",
        "a random operation",
        "draws numbers that cannot be repeated",
        'a request in request_draws, such as {"noise": fedcog.Draw((n,), "step")}, and '
        'batch["draws"]["noise"]',
        works_in_loop=False,
    ),
    Remedy(
        r"\.backward\(",
        "backward",
        "writes gradients into tensors",
        "the loss as the hook's result; local_grad changes gradients",
        works_in_loop=False,
    ),
    Remedy(
        r"\][ ]*=[^=]",
        "an assignment to elements",
        "writes the values of several clients into a tensor of one",
        "torch.where(labels[:, None] == torch.arange(num_classes, device=labels.device), new, old)",
    ),
    Remedy(
        r"\[[^\]]*:[^\]]*\.(sum|max|min|argmax|mean|long)\(",
        "a slice with a tensor as its end",
        "has as many elements as a tensor's value says",
        "all elements, and torch.where(torch.arange(n, device=x.device) < end, x, 0)",
    ),
    Remedy(
        r"\.item\(\)|\.tolist\(\)|\b(float|int|bool)\(",
        "a Python number from a tensor",
        "reads a tensor's value",
        "tensor arithmetic, which takes 0-d tensors as they are",
    ),
    Remedy(r"\.numpy\(\)|\bnp\.", "NumPy", "reads a tensor's values", "torch's own functions"),
    Remedy(
        r"\b(nonzero|argwhere|unique|unique_consecutive|masked_select|bincount|where\([^,()]+\))",
        "an operation whose result has no fixed size",
        "has as many results as values meet a condition",
        "torch.where(condition, value, 0), which keeps all elements, or masked_fill",
    ),
    Remedy(
        r"\b(if|while|assert|elif|and|or|not)\b",
        "a Python condition on a tensor",
        "reads a tensor's value",
        "torch.where(condition, a, b)",
    ),
    Remedy(
        r"\[[^\]]*(==|!=|<|>|~|mask)[^\]]*\]",
        "indexing with a boolean mask",
        "has as many results as the mask has true elements",
        "torch.where(mask, value, 0).sum() / mask.sum(), which keeps all elements",
    ),
    Remedy(
        r"(\+|-|\*|/)=|\w_\(",
        "an operation in place",
        "writes the values of several clients into a tensor of one",
        "a new tensor: total = total + value",
    ),
)
"""Remedies by what the source line looks like; the first that fits is given."""
IN_PLACE = REMEDIES[-1]
IN_PLACE_ERROR = "doesn't match the broadcast shape"
"""Part of torch's error about writing several clients' values into one tensor."""
MASK_ERROR = "boolean mask"
"""Part of torch's error about indexing with a boolean mask."""
MASK_REMEDY = next(one for one in REMEDIES if "boolean mask" in one.operation)


def explain(error: BaseException) -> str:
    """Explain an error of hooks that run for several clients at once.

    Args:
        error: What the hooks raised.

    Returns:
        Which operation failed, in which line of whose file, and what to write instead; empty if the
        error has another cause.
    """
    message = str(error)
    frame = _user_frame(error)
    if frame is None:
        return ""
    source = (frame.line or "").strip()
    is_in_place = IN_PLACE_ERROR in message and re.search(IN_PLACE.pattern, source) is not None
    is_about_batching = (
        is_in_place
        or type(error).__name__ in TYPES
        or NO_STORAGE in message
        or any(word in message.lower() for word in WORDS)
    )
    if not is_about_batching:
        return ""
    place = f"{frame.filename}, line {frame.lineno}, in {frame.name}: {source}"
    remedy = IN_PLACE if is_in_place else _remedy(source, message)
    if remedy is None:
        reason = message.strip().splitlines()[0] if message.strip() else type(error).__name__
        return f"{place}\nThis cannot run for several clients at once ({reason}). {IN_A_LOOP}"
    explanation = (
        f"{place}\nThis cannot run for several clients at once: {remedy.operation} "
        f"{remedy.reason}. Write instead: {remedy.instead}."
    )
    return f"{explanation} {IN_A_LOOP}" if remedy.works_in_loop else explanation


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame in a file that is neither fedcog's nor torch's."""
    libraries = [Path(module.__file__ or "").parent for module in (fedcog, torch)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_library = any(library in path.parents for library in libraries)
        if not is_library and "site-packages" not in path.parts and path.suffix:
            return frame
    return None


def _remedy(source: str, message: str) -> Remedy | None:
    """Return the remedy for what a source line does."""
    if MASK_ERROR in message:
        return MASK_REMEDY
    return next((one for one in REMEDIES if re.search(one.pattern, source)), None)
