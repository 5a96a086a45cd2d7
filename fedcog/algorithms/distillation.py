"""Distillation losses over a subset of the classes."""

import torch
from torch import Tensor

from fedcog.algorithms.calibrated_softmax import EXCLUDED


def masked_kl(teacher: Tensor, student: Tensor, is_excluded: Tensor) -> Tensor:
    """Compute KL(teacher || student) over the classes that are not excluded.

    Both distributions are softmaxes over these classes alone.

    Args:
        teacher: Logits `(B, C)`.
        student: Logits `(B, C)`.
        is_excluded: Which classes are left out, `(C,)` or `(B, C)`.

    Returns:
        Divergences `(B,)`; 0 where fewer than two classes are left.
    """
    log_teacher = teacher.masked_fill(is_excluded, EXCLUDED).log_softmax(-1)
    log_student = student.masked_fill(is_excluded, EXCLUDED).log_softmax(-1)
    terms = log_teacher.exp() * (log_teacher - log_student)
    divergence = torch.where(is_excluded, 0, terms).sum(-1)
    has_choice = (~is_excluded).sum(-1) >= 2
    return torch.where(has_choice, divergence, 0)
