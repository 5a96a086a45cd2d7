"""What a server observes of a recorded run's next round, computed through the engine."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcog.algorithms import Algorithm
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.core.tree import Params, State
from fedcog.data.client_batches import FederatedData
from fedcog.engine.cohort import Cohort
from fedcog.federation.backend import RoundRequest
from fedcog.federation.simulator import Simulator
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup
from fedcog.studies.audit.federation_state import FederationState, restore

MAX_ORIGINALS = 10_000
"""Number of examples that reconstructions are compared with, at most."""


class AuditCase(NamedTuple):
    """How much the audited clients train.

    Attributes:
        steps: Number of local steps; None: as many as in the run.
        examples: Number of examples in a step; None: as many as in the run.
    """

    steps: int | None = None
    examples: int | None = None


class AuditedRun(NamedTuple):
    """A recorded run before its next round.

    Attributes:
        directory: The run directory.
        checkpoint: Its last checkpoint.
        state: The federation.
        request: What the server asks of the clients.
        client: The client whose update is attacked.
        notes: What the reader has to know about the round.
    """

    directory: RunDirectory
    checkpoint: Checkpoint
    state: FederationState
    request: RoundRequest
    client: int
    notes: list[str]

    @property
    def prepared(self) -> ExperimentSetup:
        """Data, network and simulator."""
        return self.state.prepared

    @property
    def experiment(self) -> Experiment:
        """The experiment."""
        return self.state.prepared.experiment


class ValueRange(NamedTuple):
    """The range of inputs, and how it maps to values between 0 and 1.

    Attributes:
        low: Smallest input, broadcastable to one input.
        high: Largest input, broadcastable to one input.
    """

    low: Tensor
    high: Tensor

    def to_unit(self, x: Tensor) -> Tensor:
        """Map inputs to values between 0 and 1; images are un-normalized by that."""
        return (x - self.low) / (self.high - self.low)


class Originals(NamedTuple):
    """The examples that clients trained on.

    Attributes:
        data: The federated data set.
        indices: Positions in the training set, `(M,)`.
        crops: Row offset, column offset and flip of each, `(M, 3)`; None without augmentation.
        labels: The label of every example of every step, repetitions included.
    """

    data: FederatedData
    indices: Tensor
    crops: Tensor | None
    labels: Tensor

    def inputs(self, rows: slice | list[int]) -> Tensor:
        """Return some originals as inputs of the network."""
        crops = None if self.crops is None else self.crops[rows]
        return self.data.examples(self.indices[rows], crops)["x"]


class Observation(NamedTuple):
    """What a server sees of some clients, and what it does not see.

    Attributes:
        gradient: The attacker's estimate of the mean gradient, by parameter.
        params: The parameters that the clients started from.
        buffers: The running statistics that they started from.
        num_steps: Number of local steps, of the client that took most.
        num_examples: Number of examples in all steps of all clients.
        originals: What the clients trained on.
    """

    gradient: Params
    params: Params
    buffers: Params
    num_steps: int
    num_examples: int
    originals: Originals


def open_run(
    path: str | Path,
    objects: UserObjects,
    algorithm: Algorithm | None = None,
    client: int | None = None,
    **changes: Any,
) -> AuditedRun:
    """Open a recorded run before the round after its last checkpoint.

    Args:
        path: The run directory.
        objects: Objects of the user that the run used.
        algorithm: The user's algorithm, if the run used one.
        client: The client to attack; by default the first that the server samples.
        **changes: Settings that differ here: `device`, `data_dir`.

    Returns:
        The run.

    Raises:
        RecordError: If there is no run or no checkpoint, or data or network are not the run's.
        ConfigError: If the client is unknown, or something that the run needs is missing.
    """
    directory = RunDirectory(path)
    experiment = directory.experiment()
    checkpoint = directory.load()
    if checkpoint is None:
        raise RecordError(
            f"the run in {directory.path} has no checkpoint to audit: wait for its first, or run "
            "it again."
        )
    if algorithm is not None:
        changes["algorithm"] = algorithm
    if experiment.mapping == "graph":
        changes["mapping"] = "auto"
    prepared = ExperimentSetup(
        dataclasses.replace(experiment, evaluate_local=False, **changes), objects
    )
    for key, what in {"data": "data are", "network": "network is"}.items():
        if checkpoint.info.get(key) != prepared.checkpoint_info[key]:
            raise RecordError(
                f"the {what} not the one of the run in {directory.path}: the audit needs what the "
                "run was trained with."
            )
    state = restore(prepared, checkpoint)
    request, notes = _next_round(state)
    client, request = _chosen_client(request, client, prepared.data.num_clients, notes)
    if checkpoint.round < experiment.rounds:
        notes.append(
            f"The run is not finished: the audit is about round {checkpoint.round + 1} of "
            f"{experiment.rounds}."
        )
    return AuditedRun(directory, checkpoint, state, request, client, notes)


def _next_round(state: FederationState) -> tuple[RoundRequest, list[str]]:
    """Return what the server asks of its clients next, with notes."""
    prepared = state.prepared
    request = prepared.make_server().start_round(state.round)
    notes = []
    last_round = prepared.experiment.rounds - 1
    if state.round > last_round:
        request = request._replace(lr=prepared.schedule.lr_in_round(last_round))
    if not request.lr:
        raise ConfigError(
            ["the learning rate of the next round is 0: clients send nothing, so there is no leak."]
        )
    algorithm = prepared.experiment.algorithm
    has_states = bool(
        tree.flatten(
            algorithm.client_init(prepared.simulator.cohort.unpack(algorithm, request.broadcast))
        )
    )
    if has_states and prepared.experiment.backend == "flower":
        notes.append(
            "Flower's nodes keep the clients' states: audited clients start without what they kept."
        )
    return request, notes


def _chosen_client(
    request: RoundRequest, client: int | None, num_clients: int, notes: list[str]
) -> tuple[int, RoundRequest]:
    """Return the client to attack, and the request with it among the clients of the round."""
    if client is None:
        return request.client_ids[0], request
    if not 0 <= client < num_clients:
        raise ConfigError(
            [f"client {client} is unknown: this run has clients 0 to {num_clients - 1}."]
        )
    if client in request.client_ids:
        return client, request
    others = request.client_ids[:-1]
    notes.append(
        f"Client {client} takes the place of client {request.client_ids[-1]}, whom the server "
        "would have sampled."
    )
    return client, request._replace(client_ids=sorted([*others, client]))


def refusal(audited: AuditedRun) -> str:
    """Return why gradient inversion does not apply to a run; empty if it does."""
    prepared = audited.prepared
    algorithm = audited.experiment.algorithm
    if prepared.dataset.train_x.dtype == torch.int64:
        return (
            "Inputs are tokens, which are integers: the attack optimizes continuous inputs. That "
            "is no protection, because other attacks read tokens from embedding gradients."
        )
    if any(layer.sends_coverage for layer in algorithm.layers):
        return "Clients train parts of the model, which this attack does not cover."
    params = _start(audited)["params"]
    if missing := sorted(prepared.model.params.keys() - params.keys()):
        return (
            f"The server does not have the clients' whole model: {', '.join(missing)} stay with "
            "them. This attack needs all of it; attacks on the rest are not covered."
        )
    return ""


def observe(
    audited: AuditedRun, case: AuditCase, client_ids: list[int], *, is_sum: bool = False
) -> Observation:
    """Let clients train for a round, and return what the server sees of them.

    The payloads are those of the run's algorithm and engine. With differential privacy they are
    clipped and noised as in the run. The attacker divides the mean change of the parameters by the
    effective step size, -D / L, and takes that for the mean gradient at the parameters sent out. It
    is exact after one SGD step, weight decay removed; after more steps it is a model of the update.

    Args:
        audited: The run.
        case: How much the clients train.
        client_ids: The clients whose payloads are summed.
        is_sum: Whether this is the round's sum, to which central privacy adds noise.

    Returns:
        The observation.
    """
    request = audited.request
    simulator = _simulator(audited, case)
    result, _ = simulator.train(request.spec, client_ids)
    total = result.total
    privacy = audited.prepared.privacy
    if privacy is not None and is_sum:
        total = privacy.protect_sum(total, request.round)
    start = _start(audited)
    num_steps = simulator.num_steps[torch.tensor(client_ids)]
    gradient = _mean_gradient(audited, total, start["params"], num_steps)
    batch_size = simulator.cohort.config.batch_size
    return Observation(
        gradient=gradient,
        params={name: start["params"][name] for name in gradient},
        buffers=start["buffers"],
        num_steps=int(num_steps.max()),
        num_examples=int(num_steps.sum()) * batch_size,
        originals=_originals(audited, client_ids, num_steps.tolist(), batch_size),
    )


def _start(audited: AuditedRun) -> State:
    """Return what the clients make of the broadcast."""
    cohort = audited.prepared.simulator.cohort
    return cohort.unpack(audited.experiment.algorithm, audited.request.broadcast)


def _simulator(audited: AuditedRun, case: AuditCase) -> Simulator:
    """Return the run's simulator, with other numbers of local steps and examples if asked for."""
    simulator = audited.prepared.simulator
    if case == AuditCase():
        return simulator
    prepared = audited.prepared
    config = simulator.cohort.config
    other = copy.copy(simulator)
    other.cohort = Cohort(
        prepared.model,
        prepared.task,
        prepared.data,
        simulator.cohort.optimizer,
        config._replace(
            batch_size=case.examples or config.batch_size, mapping="loop", num_workers=1
        ),
        prepared.privacy,
    )
    if case.steps is not None:
        other.num_steps = torch.full_like(simulator.num_steps, case.steps)
    return other


def _mean_gradient(audited: AuditedRun, total: State, params: Params, num_steps: Tensor) -> Params:
    """Return the attacker's estimate of the mean gradient from a sum of payloads."""
    prepared = audited.prepared
    optimizer = prepared.simulator.cohort.optimizer
    delta = audited.experiment.algorithm.mean_update(total)["delta"]
    step_size = float(optimizer.effective_step_size(num_steps, audited.request.lr).mean())
    gradient = {name: -delta[name] / step_size for name in prepared.model.params}
    if int(num_steps.max()) == 1 and prepared.privacy is None:
        decay = optimizer.weight_decay
        gradient = {name: value - decay * params[name] for name, value in gradient.items()}
    return gradient


def _originals(
    audited: AuditedRun, client_ids: list[int], num_steps: list[int], batch_size: int
) -> Originals:
    """Return what some clients train on: with its augmentation, if each takes one step."""
    data = audited.prepared.data
    indices = []
    crops = []
    for client, steps in zip(client_ids, num_steps, strict=True):
        plan = data.plan_batches(audited.request.round, torch.tensor([client]), steps, batch_size)
        indices.append(plan.indices.flatten())
        if plan.crops is not None:
            crops.append(plan.crops.flatten(0, 2))
    used = torch.cat(indices)
    labels = data.train_y[used]
    if max(num_steps) == 1:
        return Originals(data, used, torch.cat(crops) if crops else None, labels)
    return Originals(data, torch.unique(used)[:MAX_ORIGINALS], None, labels)


def value_range(prepared: ExperimentSetup) -> ValueRange:
    """Return the range of a data set's inputs: bytes for images, else that of the training set."""
    dataset = prepared.dataset
    like = prepared.data.train_y.new_empty((), dtype=prepared.data.dtype)
    if dataset.train_x.dtype == torch.uint8:
        shape = (-1, *[1] * (len(dataset.input_shape) - 1))
        mean = like.new_tensor(dataset.mean).reshape(shape)
        std = like.new_tensor(dataset.std).reshape(shape)
        return ValueRange(-mean / std, (1 - mean) / std)
    low, high = dataset.train_x.aminmax()
    return ValueRange(low.to(like), high.to(like))
