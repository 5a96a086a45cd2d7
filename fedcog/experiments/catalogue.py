"""What there is to know of each algorithm, read off its class and measured on the paper's network."""

import inspect
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fedcog import settings, tree
from fedcog.algorithms import ALGORITHMS, Algorithm, Effort, Wrapper
from fedcog.data import FederatedData, from_arrays
from fedcog.federation.cohort import Cohort
from fedcog.federation.course import Members
from fedcog.federation.selection import PowerOfChoice, Uniform
from fedcog.federation.simulation import Simulation
from fedcog.models import Model, build
from fedcog.optimiser import Optimiser
from fedcog.settings import Setting
from fedcog.task import SingleLabel
from fedcog.tree import State

SHAPE, CLASSES = (3, 32, 32), 10


class Entry(NamedTuple):
    """One algorithm. Sizes are in bytes, relative to what FedAvg sends: one model."""

    name: str
    reference: str  # where it is from
    line: str  # what it is
    more: str  # what else to know
    settings: list[Setting]
    wrapper: bool
    sends: float
    receives: float
    keeps: dict[str, float]
    sums: bool  # are sums of payloads enough for it?

    @property
    def kept(self) -> str:
        """What a client keeps from round to round, in words."""
        return ", ".join(f"{name} ({size:.2f})" for name, size in self.keeps.items()) or "nothing"


def catalogue(known: Mapping[str, type[Algorithm]] = ALGORITHMS) -> list[Entry]:
    """Every algorithm, around FedAvg where it is a wrapper, with what one client sends, is sent, and keeps."""
    model = _bytes(_exchange(Algorithm())[1])
    found = []
    for name, cls in known.items():
        shared, payload, kept = _exchange(cls())
        reference, line, more = _words(cls)
        found.append(
            Entry(
                name=name,
                reference=reference,
                line=line,
                more=more,
                settings=list(settings.settings(cls).values()),
                wrapper=issubclass(cls, Wrapper),
                sends=_bytes(payload) / model,
                receives=_bytes(shared) / model,
                keeps={key: _bytes({key: value}) / model for key, value in kept.items()},
                sums=cls().uplink == "sum",
            )
        )
    return found


INTRODUCTION = """# Algorithms

Made by `fedcog list algorithms --markdown > docs/algorithms.md`. *Sends*, *is sent* and *keeps* are a client's, per
round, in bytes, measured on the CNN for CIFAR-10 (62,006 parameters), relative to what FedAvg sends: one model. *Sums*:
is the sum of what clients send enough for the server (as under secure aggregation)? Wrappers go around any other
(`fedprox+vhl+fedcog` is `FedCOG(VHL(FedProx()))`; what HeteroFL cannot go around it refuses, with the reason) and are
measured around FedAvg. Defaults are the FedCOG paper's settings where it gives any; where sources disagree, the text
says which reading is the default.

| algorithm | what it is | sends | is sent | keeps | sums |
| --- | --- | --- | --- | --- | --- |
"""


def markdown(entries: list[Entry]) -> str:
    """The catalogue as a page."""
    rows, sections = list[str](), list[str]()
    for one in entries:
        kind = " *(wrapper)*" if one.wrapper else ""
        sums = "enough" if one.sums else "**not enough**"
        sizes = f"{one.sends:.2f} | {one.receives:.2f}"
        rows.append(f"| [{one.name}](#{one.name}){kind} | {_cell(one.line)} | {sizes} | {one.kept} | {sums} |")
        parts = [f"## {one.name}", one.reference, f"{one.line} {one.more}".strip()]
        if one.settings:
            table = ["| setting | default | what it is |", "| --- | --- | --- |"]
            table += [
                f"| `--{one.name}.{s.flag}` | {s.shown} | {_cell(s.help)} ({_cell(s.kind)}) |" for s in one.settings
            ]
            parts.append("\n".join(table))
        sections.append("\n\n".join(parts))
    chosen = "\n\n".join(
        f"`--selection {name}`: {' '.join(inspect.cleandoc(cls.__doc__ or '').split())}"
        for name, cls in {"uniform": Uniform, "power-of-choice": PowerOfChoice}.items()
    )
    sections.append(f"## Who takes part\n\n{chosen}")
    return INTRODUCTION + "\n".join(rows) + "\n\n" + "\n\n".join(sections) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _words(cls: type[Algorithm]) -> tuple[str, str, str]:
    """Where an algorithm is from (its module says), what it is, and what else to know (its class says)."""
    if cls is Algorithm:  # its docstring speaks to who writes algorithms
        words = "Clients train from the server's model; it moves by the weighted mean of their changes."
        return "FedAvg (McMahan et al., AISTATS 2017, algorithm 1): what all others differ from.", words, ""
    line, _, more = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    reference = (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n")[0]
    return reference, " ".join(line.split()), " ".join(more.split())


def _exchange(algorithm: Algorithm) -> tuple[State, State, State]:
    """What a client is sent, what it sends back and what it keeps, of the paper's network; it need not train."""
    x, y = torch.zeros(CLASSES, *SHAPE, dtype=torch.uint8), torch.arange(CLASSES)
    dataset = from_arrays(x, y, x, y, classes=[str(label) for label in range(CLASSES)])
    data = FederatedData(dataset, [torch.arange(5), torch.arange(5, 10)], seed=0)
    model = Model(build("cnn", SHAPE, CLASSES, seed=0), SHAPE, CLASSES)
    cohort = Cohort(model, SingleLabel(CLASSES), data, Optimiser(), batch_size=2)
    backend = Simulation(cohort, local_steps=1, local_epochs=0, weight_cap=0)
    shared = algorithm.broadcast(backend.begin(algorithm))
    one = torch.ones((), dtype=torch.int64)
    own = backend.newcomer(algorithm, shared, 0)
    member = Members(one, own, backend.weights[0], backend.counts[0], backend.sizes[0], one)
    fixed = {"shared": cohort.unpacked(algorithm, shared), "lr": torch.tensor(0.01), "round": torch.tensor(0)}
    site = cohort.course(algorithm).site(member, fixed, shared["buffers"], one)
    kept, payload = algorithm.client_update(algorithm.client_start(site), site, Effort(one, site.lr, site.lr))
    return shared, payload, kept


def _bytes(state: State) -> int:
    return sum(value.numel() * value.element_size() for value in tree.flatten(state).values())
