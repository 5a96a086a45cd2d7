"""Membership inference and nearest neighbors: are generated inputs close to training examples?"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedcog.algorithms import FedCOG, generation
from fedcog.core import rng, tree
from fedcog.core.tasks import LabelChoice
from fedcog.core.tree import Params, State
from fedcog.engine.local_training import autograd_gradient
from fedcog.studies.audit.federation_state import FederationState, Measurement

MAX_COMPARED_IMAGES = 10_000
"""Number of test images that generated images are compared with, at most."""
MAX_COMPARED_BYTES = 2**30
"""Size of these images as inputs, at most."""
INPUTS_AT_A_TIME = 500


class LabeledInputs(NamedTuple):
    """Inputs (N, C, H, W) and their labels (N)."""

    x: Tensor
    y: Tensor


def measure_membership(
    state: FederationState, client_ids: Sequence[int] | None = None
) -> Measurement:
    """Measure how close generated images are to training images (members) and to test images.

    Members are drawn to have the class counts of the test images. To estimate chance, the test
    images are split in halves, and the probe counts how often the first half is closer.

    Args:
        state: The federation; its algorithm is FedCOG.
        client_ids: The clients that generate; all by default.

    Returns:
        Distances and AUC by view (`"pixels"`, `"features"`), the AUC of the model's loss
        (`"model"`), and the number of images of each kind.
    """
    model = state.prepared.model
    generated = _generate_for_clients(state, client_ids)
    members, others = _members_and_others(state)
    views: dict[str, Callable[[Tensor], Tensor]] = {"pixels": lambda inputs: inputs.flatten(1)}
    if model.head is not None:
        views["features"] = lambda inputs: model.features(state.weights, inputs)
    found: Measurement = {
        "generated": len(generated.x),
        "members": len(members.y),
        "others": len(others.y),
    }
    with torch.no_grad():
        for name, view in views.items():
            found[name] = _nearness(view, generated, members, others)
    return found | {"model": {"auc": _loss_auc(state, members, others)}}


def model_membership(state: FederationState) -> Measurement:
    """Measure how well the global model's loss tells training examples from test examples.

    Args:
        state: The federation.

    Returns:
        `"model"` with the AUC (0.5: not at all), and the number of examples of each kind.
    """
    members, others = _members_and_others(state)
    auc = _loss_auc(state, members, others)
    return {"members": len(members.y), "others": len(others.y), "model": {"auc": auc}}


@torch.no_grad()
def _loss_auc(state: FederationState, members: LabeledInputs, others: LabeledInputs) -> float:
    """Return the AUC of telling members from others by the model's loss."""
    model = state.prepared.model
    scores = []
    for x, y in (members, others):
        logits = _in_batches(lambda inputs: model.predict(state.weights, inputs), x)
        scores.append(-state.prepared.task.loss(logits, y))
    return _auc(*scores)


def _in_batches(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Apply a function to inputs, some at a time."""
    return torch.cat([function(part) for part in torch.split(inputs, INPUTS_AT_A_TIME)])


def _nearness(
    view: Callable[[Tensor], Tensor],
    generated: LabeledInputs,
    members: LabeledInputs,
    others: LabeledInputs,
) -> dict[str, float]:
    """Compare the distances of generated images to members and to others, in one view."""
    x = _in_batches(view, generated.x)
    to_members = _distances(x, generated.y, _in_batches(view, members.x), members.y)
    to_others = _distances(x, generated.y, _in_batches(view, others.x), others.y)
    nearest_member = to_members.min(1).values
    nearest_other = to_others.min(1).values
    first_half = to_others[:, 0::2].min(1).values
    second_half = to_others[:, 1::2].min(1).values
    scores = [
        (-distances.min(0).values).nan_to_num(neginf=-1e30) for distances in (to_members, to_others)
    ]
    return {
        "to_members": float(nearest_member.mean()),
        "to_others": float(nearest_other.mean()),
        "nearer_to_members": float((nearest_member < nearest_other).double().mean()),
        "nearer_by_chance": float((first_half < second_half).double().mean()),
        "auc": _auc(*scores),
    }


def _auc(member_scores: Tensor, other_scores: Tensor) -> float:
    """Area under the ROC curve of telling members from others by their scores."""
    from sklearn.metrics import roc_auc_score  # imported here: loading it takes a second

    truth = [1] * len(member_scores) + [0] * len(other_scores)
    return float(roc_auc_score(truth, torch.cat([member_scores, other_scores]).cpu().numpy()))


def _generate_for_clients(
    state: FederationState, client_ids: Sequence[int] | None
) -> LabeledInputs:
    """Generate the inputs of some clients, or all, as in a round."""
    algorithm = fedcog_of(state)
    inputs = []
    labels = []
    for client in range(state.prepared.data.num_clients) if client_ids is None else client_ids:
        client_labels = target_labels(state, client, algorithm.labels)
        config = algorithm.generation_config
        inputs.append(generate_inputs(state, client, client_labels, config)["x"])
        labels.append(client_labels)
    return LabeledInputs(torch.cat(inputs), torch.cat(labels))


def _members_and_others(state: FederationState) -> tuple[LabeledInputs, LabeledInputs]:
    """Clients' training images with the class counts of the test images, and the test images."""
    data = state.prepared.data
    seed = state.prepared.experiment.seed
    input_bytes = math.prod(state.prepared.dataset.input_shape) * data.dtype.itemsize
    limit = min(MAX_COMPARED_IMAGES, max(MAX_COMPARED_BYTES // input_bytes, 1))
    order = rng.permutation(seed, "privacy", 0, len(data.train_y)).to(data.device)
    is_member = torch.zeros(len(data.train_y), dtype=torch.bool, device=data.device)
    for client in range(data.num_clients):
        is_member[data.client_indices(client)] = True
    order = order[is_member[order]]
    test_labels = data.test_y[:limit]
    counts = state.prepared.task.class_counts(test_labels).tolist()
    chosen = torch.cat(
        [order[data.train_y[order] == label][:count] for label, count in enumerate(counts)]
    )
    member_inputs = data.to_inputs(data.train_x[chosen.to(data.train_x.device)])
    members = LabeledInputs(member_inputs, data.train_y[chosen])
    others = LabeledInputs(data.to_inputs(data.test_x[:limit]), test_labels)
    return members, others


def _distances(x: Tensor, y: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Distances (generated, images); infinite where the classes differ."""
    return torch.cdist(x, inputs).masked_fill(y[:, None] != labels, torch.inf)


def fedcog_of(state: FederationState) -> FedCOG:
    """Return the federation's algorithm, which is FedCOG."""
    algorithm = state.prepared.experiment.algorithm
    assert algorithm.class_name == "FedCOG", "probes of generated inputs need FedCOG outermost"
    return cast(FedCOG, algorithm)


def target_labels(state: FederationState, client: int, rule: LabelChoice) -> Tensor:
    """Return the labels for which a client generates inputs, as in a round.

    Args:
        state: The federation.
        client: The client.
        rule: Which labels to ask for.

    Returns:
        `(N,)`.
    """
    prepared = state.prepared
    random_tensors = _random_tensors(state, client)
    counts = prepared.simulator.class_counts[client]
    sizes = prepared.simulator.label_set_sizes[client]
    return prepared.task.targets(counts, sizes, rule, random_tensors["asked"])


def _random_tensors(state: FederationState, client: int) -> State:
    """A client's random tensors in the round."""
    client_ids = torch.tensor([client])
    cohort = state.prepared.simulator.cohort
    return tree.take(cohort.draws(fedcog_of(state), "client", state.round, client_ids), 0)


def generate_inputs(
    state: FederationState, client: int, labels: Tensor, recipe: generation.GenerationConfig
) -> Params:
    """Generate inputs with the given labels for one client, as in a round.

    Args:
        state: The federation.
        client: The client.
        labels: `(N,)`.
        recipe: How to generate.

    Returns:
        The end of the generation, with the inputs as `"x"`.
    """
    prepared = state.prepared
    client_state = prepared.simulator.client_state(fedcog_of(state), state.shared, client)
    noise = _random_tensors(state, client)["noise"]
    models = generation.Models(
        prepared.task, prepared.model, state.weights, client_state["previous"]
    )
    with torch.no_grad():
        return generation.generate(models, labels, noise, recipe, autograd_gradient)
