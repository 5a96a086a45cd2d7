"""Runs on Flower's simulation engine, and checks of what Flower nodes can do."""

import functools
import json
import sys
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fedcog.core.settings import ConfigError
from fedcog.core.tree import State
from fedcog.data.client_batches import Augmentation
from fedcog.data.sources.dataset_file import open_dataset, save_dataset
from fedcog.data.sources.locations import location_kind
from fedcog.federation import secure_aggregation
from fedcog.models.initialization import Network
from fedcog.runs.config.composition import algorithm_name, named_layers
from fedcog.runs.config.experiment import Experiment, read_experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import torch_settings
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.setup import ExperimentSetup, clients_per_round

if TYPE_CHECKING:
    from fedcog.federation.flower_messages import NodeSetup
    from fedcog.federation.flower_server import FlowerBackend
    from fedcog.runs.runner import Runner

MIN_SECURE_CLIENTS = 3
MAX_SECURE_CLIENTS = 2**16


def uses_flower(experiment: Experiment) -> bool:
    """Return whether clients are Flower nodes; secure aggregation needs them too."""
    return experiment.backend == "flower" or experiment.secure_aggregation


def check_flower(experiment: Experiment) -> None:
    """Check that an experiment can run on Flower's simulation engine.

    Raises:
        ConfigError: If it cannot; it lists all problems at once.
    """
    faults = node_faults(experiment)
    for name, layer in named_layers(experiment.algorithm):
        if not type(layer).__module__.startswith("fedcog."):
            faults.append(
                f"{name} is your own algorithm, which is unknown to Flower nodes: set --backend "
                "simulator."
            )
    try:
        from fedcog.federation import flower_server  # noqa: F401
    except ImportError:
        faults.append("--backend flower needs Flower: pip install 'fedcog[flower]'.")
    if any(letter.isspace() for letter in sys.executable):  # the run would wait for ever
        faults.append(
            "Flower's simulation engine uses Ray, which cannot start Python from a path with a "
            f"space, such as {sys.executable}: install fedcog elsewhere, or set --backend "
            "simulator."
        )
    if faults:
        raise ConfigError(faults)


def deployment_faults(experiment: Experiment, has_own_data: bool) -> list[str]:
    """Return what prevents a deployment.

    Args:
        experiment: The experiment.
        has_own_data: Whether nodes have their own data.

    Returns:
        The problems found.
    """
    faults = node_faults(experiment)
    if location_kind(experiment.dataset) in ("folder", "file", "hub"):
        faults.append(
            f"dataset {experiment.dataset} is a location on this machine: nodes read registered "
            "data sets by name (fedcog data list), or have their own data (--classes)."
        )
    weights_by_examples = experiment.privacy == "off" and experiment.weights != "uniform"
    if has_own_data and weights_by_examples and not experiment.weight_cap:
        faults.append(
            "clients are weighted by their number of examples, but the largest number is unknown: "
            "set --weight-cap, the number from which on a client has full weight, or --weights "
            "uniform."
        )
    if experiment.pretrained_generator or experiment.algorithm.generator_config.kind == "custom":
        faults.append(
            "nodes receive the model but no generator: set --fedcog.generator conv, which starts "
            "anew, and no --pretrained-generator."
        )
    if experiment.checkpoint_every != 1:
        faults.append("nodes store their last round only: set --checkpoint-every 1.")
    return faults


def evaluation_faults(experiment: Experiment, has_own_data: bool, has_test_data: bool) -> list[str]:
    """Return why a deployment could not evaluate its models.

    Args:
        experiment: The experiment.
        has_own_data: Whether nodes have their own data.
        has_test_data: Whether the server has test examples of its own.

    Returns:
        The problems found.
    """
    if not has_own_data or has_test_data or experiment.local_test:
        return []
    return [
        "neither the server nor the nodes have test examples: give the server some with "
        "--test-data, or hold out a part at every node with --local-test 0.2."
    ]


def node_faults(experiment: Experiment) -> list[str]:
    """Return what prevents clients from being Flower nodes, and secure aggregation."""
    faults = []
    if experiment.async_buffer:
        faults.append(
            "async_buffer simulates time, but nodes answer in real time: set --async-buffer 0."
        )
    if not experiment.secure_aggregation:
        if experiment.selection != "uniform":
            faults.append(
                "power-of-choice needs the clients' losses, which nodes do not report: set "
                "--selection uniform."
            )
        return faults
    if experiment.algorithm.uplink != "sum":
        faults.append(
            f"{algorithm_name(experiment.algorithm)} needs every client's payload, but secure "
            "aggregation reveals only the sum: choose an algorithm whose uplink is a sum (fedcog "
            "list algorithms); geometric-median is the robust mean that works with sums."
        )
    if experiment.selection != "uniform":
        faults.append(
            "power-of-choice needs every client's loss in clear, but secure aggregation reveals "
            "only the sum: set --selection uniform."
        )
    count = clients_per_round(experiment, experiment.num_clients)
    if not MIN_SECURE_CLIENTS <= count <= MAX_SECURE_CLIENTS:
        faults.append(
            f"secure aggregation needs {MIN_SECURE_CLIENTS} to {MAX_SECURE_CLIENTS} clients per "
            f"round, not {count}: of two, each would learn the other's payload, and with more, "
            "sums would be too coarse. Set --clients or --participation."
        )
    return faults


def run_on_flower(runner: "Runner") -> Run:
    """Complete a run with clients as nodes of Flower's simulation engine.

    Raises:
        Diverged: If training diverged.
        Interrupted: If the run was asked to stop.
    """
    from fedcog.federation import flower_messages, flower_server

    if runner.is_done:
        return runner.result()
    experiment = runner.experiment
    setup = flower_messages.NodeSetup(
        runner.setup.simulator, experiment.algorithm, secure_scale(experiment)
    )
    check_payload_bounds(setup, experiment.algorithm.broadcast(runner.setup.server_state))
    outcomes: list[Run | BaseException] = []

    def serve(backend: "FlowerBackend") -> None:  # runs in a thread of Flower's
        with torch_settings(experiment):
            runner.server.backend = backend
            try:
                outcomes.append(runner.run())
            except BaseException as error:
                outcomes.append(error)

    settings = json.dumps(experiment.to_dict())
    with tempfile.TemporaryDirectory(prefix="fedcog-") as folder:
        objects = _node_objects(runner, Path(folder))
        flower_server.simulate(serve, setup, functools.partial(set_up_node, settings, objects))
    if not outcomes:
        raise RuntimeError(
            "Flower's simulation engine ended before the run did: its log has more information."
        )
    outcome = outcomes[0]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def check_payload_bounds(setup: "NodeSetup", broadcast: State) -> None:
    """Check that the algorithm declares bounds for all of its payload.

    Args:
        setup: The experiment.
        broadcast: What the server sends.

    Raises:
        ConfigError: If secure aggregation is on and a bound is missing.
    """
    if not setup.secure_scale:
        return
    template = setup.simulator.payload_template(setup.algorithm, broadcast)
    missing = secure_aggregation.undeclared_parts(template, setup.algorithm.payload_bounds)
    if missing:
        name = algorithm_name(setup.algorithm)
        raise ConfigError([f"{name}.payload_bounds has no bound for '{part}'." for part in missing])


def secure_scale(experiment: Experiment) -> float:
    """Return the factor on the bounds of secure aggregation; 0 if it is off."""
    return experiment.secure_scale if experiment.secure_aggregation else 0.0


@dataclass(frozen=True)
class NodeObjects:
    """The user's objects as a node's process receives them, anew with every message.

    Attributes:
        run_id: Names the run, so that equal objects of a run are recognized.
        model: The network: an instance, or a class or function that builds it.
        generator: The generator network.
        augmentation: Changes the training examples of every batch.
        data_file: A file with the data set; empty if it has a name that is known everywhere.
    """

    run_id: str
    model: Network | None = field(default=None, compare=False)
    generator: nn.Module | None = field(default=None, compare=False)
    augmentation: Augmentation | None = field(default=None, compare=False)
    data_file: str = ""


def _node_objects(runner: "Runner", folder: Path) -> NodeObjects:
    """Collect what nodes need of the user's objects, with the data set as a file in a folder."""
    objects = runner.objects
    data_file = ""
    if location_kind(runner.experiment.dataset) != "name":
        assert objects.preloaded is not None
        data_file = str(folder / "data.npz")
        save_dataset(objects.preloaded, Path(data_file))
    return NodeObjects(
        uuid.uuid4().hex, objects.model, objects.generator, objects.augmentation, data_file
    )


@functools.lru_cache(maxsize=1)
def set_up_node(settings: str, objects: NodeObjects) -> "NodeSetup":
    """Set an experiment up in a node's process, on one thread.

    Args:
        settings: The experiment as JSON.
        objects: Objects of the user.

    Returns:
        The experiment as the node sees it.
    """
    from fedcog.federation.flower_messages import NodeSetup

    torch.set_num_threads(1)
    experiment = read_experiment(json.loads(settings))
    experiment = replace(experiment, mapping="loop", workers=1, threads=1)
    user_objects = UserObjects(
        model=objects.model,
        generator=objects.generator,
        augmentation=objects.augmentation,
        preloaded=open_dataset(Path(objects.data_file)) if objects.data_file else None,
    )
    setup = ExperimentSetup(experiment, user_objects)
    return NodeSetup(setup.simulator, experiment.algorithm, secure_scale(experiment))
