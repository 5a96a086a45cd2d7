"""Clients of several federations in one cohort: put together before a round, told apart after it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedcog import tree
from fedcog.federation.clock import Clock
from fedcog.federation.course import Finish, Members
from fedcog.federation.outcomes import Outcome
from fedcog.federation.payloads import one_alone, summed
from fedcog.tree import State

if TYPE_CHECKING:
    from fedcog.federation.cohort import Cohort


class Party(NamedTuple):
    """Clients of one federation, what they were sent, and the cohort that knows their data and seed."""

    cohort: "Cohort"
    shared: State
    members: Members


def everybody(parties: Sequence[Party]) -> Members:
    """All parties' members, one after another."""
    if len(parties) == 1:
        return parties[0].members
    return Members(**tree.join([party.members._asdict() for party in parties]))


def sent(parties: Sequence[Party]) -> State:
    """What the members were sent: one for all, or of several parties a copy for each member."""
    if len(parties) == 1:
        return parties[0].shared
    return tree.join([tree.expand(party.shared, len(party.members.number)) for party in parties])


def rates_of(each: Sequence[float], parties: Sequence[Party]) -> Tensor:
    """The learning rate of every member, given each party's; where all are the same, one for all."""
    if len({*each}) == 1:
        return torch.tensor(each[0], dtype=torch.float64)
    sizes = torch.tensor([len(party.members.number) for party in parties])
    return torch.tensor(each, dtype=torch.float64).repeat_interleave(sizes)


def outcomes(
    found: State, parties: Sequence[Party], round: int, count: int, stacked: bool, clock: Clock
) -> list[Outcome]:
    """What each party's round comes to: of its members all, or the first `count`."""
    sizes = [party.members.number.numel() for party in parties]
    told, start = [], 0

    def seconds() -> dict[str, float]:
        return {part: value / len(sizes) for part, value in clock.seconds().items()}

    for size, party in zip(sizes, parties, strict=True):
        mine = tree.pick(found, slice(start, start + (count or size)))
        one, start = Finish(**mine["done"]), start + size
        if privacy := party.cohort.privacy:
            own = party.members.number.reshape(-1)[: count or size]
            one = one._replace(payload=privacy.sent(one.payload, own, round))
        told.append(
            Outcome(
                kept=one.kept,
                total=summed(one.payload, one.sound) if stacked else one_alone(tree.pick(one.payload, 0)),
                sound=one.sound,
                keepable=one.keepable,
                loss=mine["loss"],
                distance=one.distance,
                hits=mine.get("hits"),
                exhibit=tree.pick(mine.get("exhibit", {}), 0),
                seconds=seconds,
            )
        )
    return told
