"""What a cohort's round comes to, alone or joined of parts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedcog import tree
from fedcog.federation.payloads import joined
from fedcog.tree import Params, State


class Outcome(NamedTuple):
    """What a cohort's round comes to."""

    kept: State  # stacked, client by client
    total: State  # the sum of the sound payloads
    sound: Tensor  # [clients], is all that the client sends finite?
    keepable: Tensor  # [clients], is all that it keeps finite?
    loss: Tensor  # [clients], mean over the client's steps
    distance: Tensor  # [clients], of the local model from the one it was sent
    hits: Tensor | None  # [clients, ..., classes], the local models' on the test set
    exhibit: Params  # what a report should show of the first client
    seconds: Callable[[], dict[str, float]]  # by part; to be asked for when the device has finished


def one_after_another(done: list[Outcome]) -> Outcome:
    """The outcomes of clients that were trained alone, as that of a cohort."""
    nobody = not any(one.sound for one in done)  # then what is not finite is summed, and found to be so
    ones = [one if one.sound or nobody else one._replace(total={}) for one in done]
    return side_by_side(ones)


def side_by_side(done: Sequence[Outcome]) -> Outcome:
    """The outcomes of parts of a cohort, as that of the whole."""
    if len(done) == 1:
        return done[0]
    hits = [one.hits for one in done if one.hits is not None]
    together = {
        name: torch.cat([getattr(one, name) for one in done]) for name in ("sound", "keepable", "loss", "distance")
    }
    return Outcome(
        kept=tree.join([one.kept for one in done]),
        total=joined([one.total for one in done if one.total]),
        hits=torch.cat(hits) if hits else None,
        exhibit=next((one.exhibit for one in done if one.exhibit), {}),
        seconds=lambda: {part: sum(one.seconds()[part] for one in done) for part in done[0].seconds()},
        **together,
    )
