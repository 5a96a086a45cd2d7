"""FedCOG in a training loop of your own: `generate` before local training, and its loss in every step.

    made = fedcog.generate(global_model, previous_model, counts, input_shape)
    for x, y in loader:
        loss = made.loss(criterion(model(x), y), model)

These are the hooks that the engine calls, on plain networks; given its seed, round and client, also on its numbers.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcog import streams, tree
from fedcog.algorithms import Algorithm, Batch, FedCOG, Site
from fedcog.federation.course import autograd
from fedcog.fitness import TOKENS, ModelError
from fedcog.generators import usable
from fedcog.models import Model
from fedcog.settings import ConfigError, read
from fedcog.task import task_of
from fedcog.tree import Params, State

MOST = 10**12
"""Examples of a class that a client may have: sums of more would not be exact."""
LARGEST = 2**63 - 1
"""Of seeds, rounds and clients."""


class Given(Algorithm):
    """An algorithm of which nothing is known but its loss on real examples."""

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """What was given for it."""
        real: Tensor = outputs["real"]
        return real


@dataclass
class Complement:
    """What a client has beside its data in a round: inputs, the labels asked for, and the global model's outputs."""

    x: Tensor
    y: Tensor
    logits: Tensor
    _cog: FedCOG
    _site: Site
    _stream: tuple[int, int, int]  # seed, round and client
    _served: int = 0
    _order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def batch(self, size: int = 64) -> dict[str, Tensor]:
        """The next inputs {"x"} with {"y"} and {"logits"}: shuffled, and each once before any comes twice."""
        if not _whole(size) or size < 1:
            raise ValueError(f"a batch has a whole number of inputs, at least one, not {size}.")
        first, self._served = self._served, self._served + size
        if self._served > len(self._order):
            seed, round, client = self._stream
            length = max(2 * self._served, 64 * size)
            sizes = torch.tensor([len(self.x)])
            self._order = streams.windows(seed, "extra/made", round, torch.tensor([client]), sizes, length)[0]
        rows = self._order[first : self._served].to(self.x.device)
        return {"x": self.x[rows], "y": self.y[rows], "logits": self.logits[rows]}

    def loss(self, real: Tensor, model: nn.Module, size: int = 64) -> Tensor:
        """The loss of a step, of which `real` is that on real examples: both by their shares (eq. 3).

        Running statistics of the model do not move for generated inputs.
        """
        batch = self.batch(size)
        still = {name: value.clone() for name, value in model.named_buffers()}
        outputs = functional_call(model, still, (batch["x"],))
        return self._cog.data_loss({"real": real, "made": outputs}, {"made": batch}, self._site)


@torch.inference_mode(False)
def generate(
    global_model: nn.Module,
    previous_model: nn.Module | None,
    counts: Sequence[int] | Tensor,
    input_shape: Sequence[int],
    *,
    sizes: Sequence[int] | Tensor | None = None,
    seed: int = 0,
    round: int = 0,
    client: int = 0,
    **settings: Any,
) -> Complement:
    """What a client generates in a round: inputs the global model is sure of and its previous local one is not.

    `counts` are the client's examples of each class; for several labels an example, `sizes` are its examples of no
    label, one, two and so on. Who never took part has no previous model. Inputs are as the models take
    them, normalised. `settings` are FedCOG's, such as steps=100 or lambda_dis=0.1; `generator` may be a network.
    """
    module = settings.pop("generator", "none")
    own = isinstance(module, nn.Module)
    known, faults = read(FedCOG, {"generator": "custom" if own else module} | settings, "fedcog.")
    faults += _uncounted("counts", counts) + ([] if sizes is None else _uncounted("sizes", sizes))
    whole = {"seed": seed, "round": round, "client": client}
    faults += [
        f"{name} needs a whole number from 0 to {LARGEST}, not {value!r}."
        for name, value in whole.items()
        if not _whole(value) or value > LARGEST
    ]
    seed, round, client = (value if faults else operator.index(value) for value in whole.values())
    shape = tuple(input_shape) if isinstance(input_shape, Iterable) else (input_shape,)
    if not shape or not all(_whole(side) and side > 0 for side in shape):
        faults.append(f"input_shape needs the sides of one input, such as (1, 28, 28), not {input_shape!r}.")
    if known.get("control", "off") != "off":
        faults.append("fedcog.control is for the engine, which has the learning rate in hand: leave it out.")
    if faults:
        raise ConfigError(faults)
    cog = replace(FedCOG(Given(), **known), start_round=0)
    model = Model(global_model, shape, len(counts), trained=False)
    if not model.params:
        raise ModelError("the global model has no weights that could be trained.")
    if not model.smooth:
        raise ModelError(f"the global model's outputs have no gradient with respect to its inputs. {TOKENS}")
    some = next(iter(model.params.values()))
    if own:
        model.generator = usable(module, cog.noise, shape).to(some)
    shared: State = {"params": model.params, "buffers": model.buffers}
    now, zero = torch.tensor(round, device=some.device), some.new_zeros(())
    site = Site(
        model=model,
        task=task_of(len(counts), sizes is not None),
        shared=shared,
        own={"previous": _weights(global_model if previous_model is None else previous_model, shared)},
        buffers=model.buffers,
        weight=zero + 1,
        counts=torch.as_tensor(counts, device=some.device).long(),
        sizes=torch.as_tensor([0] if sizes is None else sizes, device=some.device).long(),
        round=now,
        step=now * 0,
        steps=now * 0,
        lr=zero,
        batch_size=0,
        gradient=autograd,
    )
    who, drawn = torch.tensor([client], device=some.device), dict[str, Tensor]()
    for name, (form, _, kind) in cog.draws(round, model, 0).items():
        source = streams.normal if kind == "normal" else streams.uniform
        drawn[name] = source(seed, f"draw/{name}", round, who, form)[0].to(some.dtype)
    with torch.no_grad():
        draft = cog.draft(site, drawn)
        for step in torch.arange(cog.redrafts(round), device=some.device):
            draft = cog.redraft(draft, replace(site, step=step))
        made = cog.extra_data(site, draft).groups.get("made")
    if made is None:
        raise ConfigError(["fedcog.source 'nothing' generates nothing: leave generate out instead."])
    if not all(bool(made[name].isfinite().all()) for name in ("x", "logits")):
        raise ModelError(
            f"what was generated is not finite: the models' weights ({some.dtype}) are not, or are of too few bits."
        )
    return Complement(made["x"], made["y"], made["logits"], cog, site, (seed, round, client))


def distillation_loss(outputs: Tensor, teacher: Tensor, several: bool = False) -> Tensor:
    """How far logits are from a teacher's, on average: KL of softmax or, of several labels, of each one's sigmoid."""
    if not outputs.numel():
        raise ValueError("there are no logits to compare: a mean of none is no number.")
    if outputs.shape != teacher.shape:
        raise ValueError(f"logits {list(outputs.shape)} and a teacher's {list(teacher.shape)} must be as many.")
    return task_of(outputs.shape[-1], several).distil(teacher, outputs).mean()


def _uncounted(name: str, values: Sequence[int] | Tensor) -> list[str]:
    """Why those are no numbers of examples, if so."""
    try:
        found = torch.as_tensor(values)
        fine = found.dim() == 1 and found.dtype is not torch.bool and not found.is_complex()
        number = found.double()
        fine = fine and bool(((number >= 0) & (number <= MOST) & (number == number.trunc())).all())
    except (TypeError, ValueError, RuntimeError):  # torch's words for what is no row of numbers
        fine = False
    return [] if fine else [f"{name} needs whole numbers from 0 to {MOST:.0e}, one after another, not {values!r}."]


def _whole(value: Any) -> bool:
    """Is it a whole number, and not below 0?"""
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False


def _weights(module: nn.Module, shared: Mapping[str, Params]) -> Params:
    """A network's weights by name, of the same form as what is shared."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"the previous model must be a network like the global one, not of {type(module).__name__}.")
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    wanted = shared["params"] | shared["buffers"]
    if odd := [name for name, value in wanted.items() if name not in found or found[name].shape != value.shape]:
        raise ModelError(f"the previous model must be of the same form as the global one: '{odd[0]}' is not.")
    some = next(iter(wanted.values()))
    return tree.apply(lambda value: value.detach().to(some), {name: found[name] for name in wanted})
