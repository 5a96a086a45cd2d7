"""FedCOG in a training loop of your own: `generate` before local training, its loss in every step.

    made = fedcog.generate(global_model, previous_model, class_counts, input_shape)
    for x, y in loader:
        loss = made.loss(criterion(model(x), y), model)

These are the hooks that the engine calls, on plain networks. With its seed, round and client they
give the engine's numbers.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcog.algorithms import Algorithm, Batch, ClientContext, FedCOG
from fedcog.core import rng, tree
from fedcog.core.settings import ConfigError, read
from fedcog.core.tasks import make_task
from fedcog.core.tree import Params, State
from fedcog.engine.local_training import autograd_gradient
from fedcog.models.checks import TOKENS_HINT, ModelError
from fedcog.models.functional import Model
from fedcog.models.generators import check_generator
from fedcog.models.tokens import EmbeddedNetwork, takes_tokens

MAX_EXAMPLES = 10**12
"""Examples of a class that a client may have: larger sums would not be exact."""
MAX_STREAM_NUMBER = 2**63 - 1
"""Largest seed, round and client id."""
MIN_ORDER_BATCHES = 64
"""Number of batches whose order is drawn at once."""

Counts = Sequence[int] | Tensor


class RandomStream(NamedTuple):
    """What random numbers are keyed by."""

    seed: int
    round: int
    client_id: int


class GivenLoss(Algorithm):
    """An algorithm of which only the loss on real examples is known."""

    def data_loss(self, outputs: State, batch: Batch, client: ClientContext) -> Tensor:
        """Return the given loss.

        Returns:
            A 0-d tensor.
        """
        real: Tensor = outputs["real"]
        return real


@dataclass
class GeneratedData:
    """The inputs that a client generated for a round.

    Attributes:
        x: Generated inputs, `(N, *input_shape)`.
        y: Target labels, `(N,)`, or `(N, C)` booleans if multi-label.
        logits: The global model's outputs, `(N, C)`.
    """

    x: Tensor
    y: Tensor
    logits: Tensor
    _fedcog: FedCOG
    _client: ClientContext
    _stream: RandomStream
    _num_served: int = 0
    _order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def batch(self, size: int = 64) -> dict[str, Tensor]:
        """Return the next batch: shuffled, without repetition until all inputs were used.

        Args:
            size: Number of inputs.

        Returns:
            `"x"`, `"y"` and `"logits"`.

        Raises:
            ValueError: If the size is not a positive integer.
        """
        if not _is_count(size) or size < 1:
            raise ValueError(f"the size of a batch must be a positive integer, not {size}.")
        start = self._num_served
        end = start + size
        if end > len(self._order):
            self._order = rng.epoch_indices(
                self._stream.seed,
                "extra/made",
                self._stream.round,
                torch.tensor([self._stream.client_id]),
                torch.tensor([len(self.x)]),
                max(2 * end, MIN_ORDER_BATCHES * size),
            )[0]
        self._num_served = end
        rows = self._order[start:end].to(self.x.device)
        return {"x": self.x[rows], "y": self.y[rows], "logits": self.logits[rows]}

    def loss(self, real: Tensor, model: nn.Module, size: int = 64) -> Tensor:
        """Combine the loss on real examples with that on generated inputs (eq. 3).

        Args:
            real: The loss on real examples, a 0-d tensor.
            model: The network in training; generated inputs leave its running statistics unchanged.
            size: Number of generated inputs in the batch.

        Returns:
            The loss of the step, a 0-d tensor.
        """
        batch = self.batch(size)
        model = EmbeddedNetwork(model) if takes_tokens(model) else model
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        logits = functional_call(model, buffers, (batch["x"],))
        outputs = {"real": real, "made": logits}
        return self._fedcog.data_loss(outputs, {"made": batch}, self._client)


@torch.inference_mode(False)
def generate(
    global_model: nn.Module,
    previous_model: nn.Module | None,
    class_counts: Counts,
    input_shape: Sequence[int],
    *,
    seed: int = 0,
    round: int = 0,
    client: int = 0,
    **settings: Any,
) -> GeneratedData:
    """Generate a client's inputs for a round.

    Args:
        global_model: The global model, in the state that local training starts from.
        previous_model: The client's model of its last round; None if it never took part.
        class_counts: The client's number of examples of each class, `(C,)`.
        input_shape: Shape of one input, such as (1, 28, 28), or (64,) for 64 tokens, whose
            embeddings are generated. Inputs are normalized, as the models
            take them.
        seed: Seed.
        round: Current round, from 0.
        client: Client id.
        **settings: Settings of FedCOG, such as steps=100 or lambda_dis=0.1; `generator` may be a
            network. For multi-label examples, `label_set_sizes`: the client's number of examples
            with 0, 1, 2, ... labels.

    Returns:
        The generated inputs.

    Raises:
        ConfigError: If an argument is invalid.
        ModelError: If the models cannot be used.

    Example:
        ```python
        from torch import nn

        import fedcog

        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        made = fedcog.generate(model, None, [9, 0, 0, 0, 0, 0, 0, 0, 0, 3], (1, 8, 8), steps=5)
        print(made.x.shape, made.y[:8])
        ```
    """
    label_set_sizes: Counts | None = settings.pop("label_set_sizes", None)
    generator = settings.pop("generator", "none")
    stream, faults = _check_stream(seed, round, client)
    shape, shape_faults = _check_shape(input_shape)
    fedcog, setting_faults = _make_fedcog(generator, settings)
    count_faults = _count_faults("class_counts", class_counts)
    faults = setting_faults + count_faults + faults + shape_faults
    if label_set_sizes is not None:
        faults += _count_faults("label_set_sizes", label_set_sizes)
    if faults or fedcog is None:
        raise ConfigError(faults)
    previous = global_model if previous_model is None else previous_model
    model = _make_model(global_model, shape, len(class_counts), generator, fedcog)
    context = _make_context(model, previous, class_counts, label_set_sizes, stream)
    made = _run_generation(fedcog, context, stream)
    return GeneratedData(made["x"], made["y"], made["logits"], fedcog, context, stream)


def distillation_loss(outputs: Tensor, teacher: Tensor, multi_label: bool = False) -> Tensor:
    """Return the mean distillation loss of logits.

    Args:
        outputs: The student's logits, `(B, C)`.
        teacher: The teacher's logits, `(B, C)`.
        multi_label: Whether an example may have several labels: KL of sigmoids, not of softmax.

    Returns:
        A 0-d tensor.

    Raises:
        ValueError: If there are no logits, or the shapes differ.
    """
    if not outputs.numel():
        raise ValueError("there are no logits to compare.")
    if outputs.shape != teacher.shape:
        raise ValueError(
            f"the logits have shape {list(outputs.shape)}, but the teacher's have "
            f"{list(teacher.shape)}."
        )
    return make_task(outputs.shape[-1], multi_label).distillation_loss(teacher, outputs).mean()


def _run_generation(fedcog: FedCOG, context: ClientContext, stream: RandomStream) -> Batch:
    """Call FedCOG's hooks in the engine's order, and return the generated group.

    Raises:
        ConfigError: If the settings generate nothing.
        ModelError: If the generated inputs or their logits are not finite.
    """
    like = context.lr
    client_ids = torch.tensor([stream.client_id], device=like.device)
    draws: State = {}
    for name, (shape, _, kind) in fedcog.request_draws(stream.round, context.model, 0).items():
        draw = rng.normal if kind == "normal" else rng.uniform
        values = draw(stream.seed, f"draw/{name}", stream.round, client_ids, shape)
        draws[name] = values[0].to(like.dtype)
    with torch.no_grad():
        gen_state = fedcog.generation_init(context, draws)
        num_steps = fedcog.num_generation_steps(stream.round)
        for step in torch.arange(num_steps, device=like.device):
            gen_state = fedcog.generation_step(gen_state, replace(context, step=step))
        made: Batch | None = fedcog.extra_data(context, gen_state).groups.get("made")
    if made is None:
        raise ConfigError(["fedcog.source 'nothing' generates nothing: do not call generate."])
    if not all(bool(made[name].isfinite().all()) for name in ("x", "logits")):
        raise ModelError(
            f"generated inputs are not finite: the models' weights ({like.dtype}) are not "
            "finite, or their precision is too low."
        )
    return made


def _make_fedcog(generator: Any, settings: Mapping[str, Any]) -> tuple[FedCOG | None, list[str]]:
    """Create FedCOG from its settings; return it, or faults."""
    kind = "custom" if isinstance(generator, nn.Module) else generator
    values, faults = read(FedCOG, {"generator": kind, **settings}, "fedcog.")
    if values.get("control", "off") != "off":
        faults.append("fedcog.control needs the engine, which has the learning rate: remove it.")
    if faults:
        return None, faults
    return replace(FedCOG(GivenLoss(), **values), start_round=0), []


def _make_model(
    global_model: nn.Module,
    input_shape: tuple[int, ...],
    num_classes: int,
    generator: Any,
    fedcog: FedCOG,
) -> Model:
    """Wrap the global model, and check that inputs can be optimized for it."""
    model = Model(global_model, input_shape, num_classes, trained=False)
    if not model.params:
        raise ModelError("the global model has no weights.")
    if not model.has_input_gradient:
        raise ModelError(
            f"the global model's outputs have no gradient with respect to its inputs. {TOKENS_HINT}"
        )
    if isinstance(generator, nn.Module):
        like = next(iter(model.params.values()))
        model.generator = check_generator(generator, fedcog.noise, model.continuous_shape).to(like)
    return model


def _make_context(
    model: Model,
    previous: nn.Module,
    class_counts: Counts,
    label_set_sizes: Counts | None,
    stream: RandomStream,
) -> ClientContext:
    """Create what the hooks see of the client."""
    like = next(iter(model.params.values()))
    broadcast: State = {"params": model.params, "buffers": model.buffers}
    sizes = [0] if label_set_sizes is None else label_set_sizes
    zero = torch.tensor(0, device=like.device)
    return ClientContext(
        model=model,
        task=make_task(len(class_counts), label_set_sizes is not None),
        broadcast=broadcast,
        state={"previous": _matching_weights(previous, broadcast)},
        buffers=model.buffers,
        weight=like.new_ones(()),
        class_counts=torch.as_tensor(class_counts, device=like.device).long(),
        label_set_sizes=torch.as_tensor(sizes, device=like.device).long(),
        round=zero + stream.round,
        step=zero,
        num_steps=zero,
        lr=like.new_zeros(()),
        batch_size=0,
        gradient=autograd_gradient,
    )


def _check_stream(seed: Any, round: Any, client: Any) -> tuple[RandomStream, list[str]]:
    """Check seed, round and client id."""
    values = {"seed": seed, "round": round, "client": client}
    faults = [
        f"{name} needs an integer from 0 to {MAX_STREAM_NUMBER}, not {value!r}."
        for name, value in values.items()
        if not _is_count(value) or value > MAX_STREAM_NUMBER
    ]
    if faults:
        return RandomStream(0, 0, 0), faults
    return RandomStream(*map(operator.index, values.values())), []


def _check_shape(input_shape: Any) -> tuple[tuple[int, ...], list[str]]:
    """Check the shape of one input."""
    shape = tuple(input_shape) if isinstance(input_shape, Iterable) else (input_shape,)
    if shape and all(_is_count(side) and side > 0 for side in shape):
        return shape, []
    return (), [
        f"input_shape needs the shape of one input, such as (1, 28, 28), not {input_shape!r}."
    ]


def _count_faults(name: str, values: Counts) -> list[str]:
    """Return why values are not numbers of examples."""
    try:
        tensor = torch.as_tensor(values)
        is_valid = tensor.dim() == 1 and tensor.dtype is not torch.bool
        is_valid = is_valid and not tensor.is_complex()
        number = tensor.double()
        in_range = (number >= 0) & (number <= MAX_EXAMPLES) & (number == number.trunc())
        is_valid = is_valid and bool(in_range.all())
    except (TypeError, ValueError, RuntimeError):  # what torch raises for anything but numbers
        is_valid = False
    if is_valid:
        return []
    return [f"{name} needs a list of integers from 0 to {MAX_EXAMPLES:.0e}, not {values!r}."]


def _is_count(value: Any) -> bool:
    """Return whether a value is an integer of at least 0."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= 0
    except TypeError:
        return False


def _matching_weights(module: nn.Module, broadcast: Mapping[str, Params]) -> Params:
    """Return a network's weights by name, which must fit the global model's."""
    if not isinstance(module, nn.Module):
        raise ModelError(
            "the previous model must be a network like the global one, not "
            f"{type(module).__name__}."
        )
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    expected = broadcast["params"] | broadcast["buffers"]
    for name, value in expected.items():
        if name not in weights or weights[name].shape != value.shape:
            raise ModelError(
                f"the previous model must have the form of the global one, but '{name}' differs."
            )
    like = next(iter(expected.values()))
    selected = {name: weights[name] for name in expected}
    return tree.apply(lambda value: value.detach().to(like), selected)
