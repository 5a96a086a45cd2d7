"""The two apps of a federation on Flower: one on the server, one on every node.

A Flower app names both, and its configuration holds the settings of the experiment. See
`examples/flower-app`.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedcog.algorithms import ALGORITHMS, Algorithm
from fedcog.core.settings import ConfigError
from fedcog.core.tasks import METRIC_LABELS, metric_of
from fedcog.data import Dataset, node_data
from fedcog.deploy.defaults import DEPLOYMENT_DEFAULTS
from fedcog.federation.flower_client import ClientApp, Context
from fedcog.federation.flower_client import client_app as flower_client
from fedcog.federation.flower_messages import NodeSetup
from fedcog.federation.flower_server import FlowerBackend, ServerApp
from fedcog.federation.flower_server import server_app as flower_server
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment, read_experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import torch_settings
from fedcog.runs.flower_runs import (
    check_payload_bounds,
    deployment_faults,
    evaluation_faults,
    secure_scale,
)
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.runner import Runner, RunOptions
from fedcog.runs.setup import ExperimentSetup, RemoteClients

LOG = logging.getLogger("flwr")  # `flwr run --stream` shows what is logged here

NetworkFactory = Callable[[], nn.Module]
ConnectNodes = Callable[[NodeSetup, str, float], FlowerBackend]


def server_app(
    network: NetworkFactory | None = None, algorithms: Sequence[type[Algorithm]] = ()
) -> ServerApp:
    """Build the app of the server.

    Args:
        network: Builds your own network, from the experiment's seed; None: the network that the
            settings name.
        algorithms: Your own algorithms, which the settings may name.

    Returns:
        The app.
    """

    def _run_server(config: dict[str, Any], connect_nodes: ConnectNodes) -> None:
        experiment, deployment = read_settings(config, algorithms)
        with torch_settings(experiment), _warnings_to_log():
            _serve(experiment, deployment, network, connect_nodes)

    return flower_server(_run_server)


def client_app(
    network: NetworkFactory | None = None, algorithms: Sequence[type[Algorithm]] = ()
) -> ClientApp:
    """Build the app of a node.

    Args:
        network: The same as on the server.
        algorithms: The same as on the server.

    Returns:
        The app.
    """
    return flower_client(functools.partial(_prepare, network, tuple(algorithms)))


def _prepare(
    network: NetworkFactory | None, algorithms: tuple[type[Algorithm], ...], context: Context
) -> NodeSetup:
    run_config = json.dumps(dict(context.run_config))
    node_config = json.dumps(dict(context.node_config))
    return _prepare_node(run_config, node_config, network, algorithms)


@functools.lru_cache(maxsize=1)
def _prepare_node(
    run_config: str,
    node_config: str,
    network: NetworkFactory | None,
    algorithms: tuple[type[Algorithm], ...],
) -> NodeSetup:
    """Set up the experiment on a node; both configurations are JSON."""
    experiment, deployment = read_settings(json.loads(run_config), algorithms)
    node: dict[str, Any] = json.loads(node_config)
    threads = int(node.get("threads", 0))
    changes: dict[str, Any] = {
        "device": str(node.get("device", "auto")),
        "threads": threads,
        "mapping": "loop",
        "workers": 1,
        "pretrained": "",  # the server loads pretrained weights, and sends them
    }
    if "data-dir" in node:
        changes["data_dir"] = str(node["data-dir"])
    experiment = replace(experiment, **changes)
    data = None
    held = None
    if experiment.dataset == "custom":
        data = node_data.read(str(node.get("data", "")), _class_names(deployment))
        held = {int(node["partition-id"]): torch.arange(len(data.train_y))}
    if threads:
        torch.set_num_threads(threads)
    objects = UserObjects(data=data, model=network)
    setup = ExperimentSetup(experiment, objects, RemoteClients(held))
    return NodeSetup(setup.simulator, experiment.algorithm, secure_scale(experiment))


def read_settings(
    settings: Mapping[str, Any], algorithms: Sequence[type[Algorithm]] = ()
) -> tuple[Experiment, dict[str, Any]]:
    """Read the configuration of an app.

    Args:
        settings: The configuration, with keys such as `rounds` and `fedprox.mu`.
        algorithms: Your own algorithms, which the settings may name.

    Returns:
        The experiment, and the settings of the deployment itself.

    Raises:
        ConfigError: All faults at once.
    """
    deployment = DEPLOYMENT_DEFAULTS | {
        name: value for name, value in settings.items() if name in DEPLOYMENT_DEFAULTS
    }
    faults = list[str]()
    values: dict[str, Any] = {}
    for path, value in settings.items():
        if path in DEPLOYMENT_DEFAULTS:
            continue
        table_name, _, name = path.rpartition(".")
        table = values.setdefault(table_name, {}) if table_name else values
        if isinstance(table, dict):
            table[name] = value
        else:
            faults.append(f"{path}: {table_name} is not a table of settings.")
    patience = deployment["patience"]
    if not isinstance(patience, int | float) or not 0 < patience < math.inf:
        faults.append(f"patience needs seconds above 0, not {patience!r}.")
    for name in ("out", "data", "classes", "shape"):
        if type(deployment[name]) is not str:
            faults.append(f"{name} needs text, not {deployment[name]!r}.")
    known = ALGORITHMS | {cls.__name__: cls for cls in algorithms}
    experiment = replace(read_experiment(values, faults, known), backend="flower")
    has_own_data = experiment.dataset == "custom"
    if has_own_data:  # the server knows nothing of the nodes' data, and cannot test on it
        experiment = replace(experiment, evaluate_local=False, partition="given")
    experiment = replace(experiment, clients=experiment.num_clients)
    node_faults = deployment_faults(experiment, has_own_data)
    has_test_data = bool(deployment["data"])
    node_faults += evaluation_faults(experiment, has_own_data, has_test_data)
    if node_faults:
        raise ConfigError(node_faults)
    return experiment, deployment


def _serve(
    experiment: Experiment,
    deployment: dict[str, Any],
    network: NetworkFactory | None,
    connect_nodes: ConnectNodes,
) -> None:
    """Run or resume the experiment, and write the report."""
    data: Dataset | None = None
    if experiment.dataset == "custom":
        data = _server_data(deployment)
    objects = UserObjects(data=data, model=network)
    options = RunOptions(resume=True, callbacks=[_log_round], command="flwr run")
    with Runner(experiment, deployment["out"], objects, options, remote=True) as runner:
        if runner.is_done:
            LOG.info(
                f"{runner.directory.path} already holds all {experiment.rounds} rounds: set "
                "another out to start a new run."
            )
            return
        algorithm = experiment.algorithm
        setup = NodeSetup(runner.setup.simulator, algorithm, secure_scale(experiment))
        check_payload_bounds(setup, algorithm.broadcast(runner.setup.server_state))
        started = runner.directory.provenance().get("started", "")
        run_id = hashlib.sha256(f"{experiment.identity} {started}".encode()).hexdigest()[:16]
        LOG.info(f"{algorithm_name(algorithm)}: waiting for {experiment.clients} nodes")
        runner.server.backend = connect_nodes(setup, run_id, float(deployment["patience"]))
        run = runner.run()
    from fedcog.report import page  # imported here: it loads matplotlib

    RunDirectory(run.path).save_report(page([run.path]))
    LOG.info(f"done: {run.path / 'report.html'}")


def _server_data(deployment: Mapping[str, Any]) -> Dataset:
    """Return the server's test examples, or a data set without any if nodes evaluate."""
    classes = _class_names(deployment)
    if deployment["data"] or not deployment["shape"]:
        return node_data.read(str(deployment["data"]), classes)
    return node_data.without_examples(str(deployment["shape"]), classes)


def _log_round(experiment: Experiment, line: dict[str, Any]) -> None:
    """Log loss, score and spent privacy of a round."""
    message = f"round {line['round']} of {experiment.rounds}"
    if math.isfinite(line["loss"]):
        message += f": loss {line['loss']:.4f}"
    metric = metric_of(line)
    if line.get(metric) is not None:
        message += f", {METRIC_LABELS[metric]} {line[metric]:.2%}"
    if "privacy" in line:
        message += f", epsilon {line['privacy']['epsilon']:.3g}"
    LOG.info(message)


@contextlib.contextmanager
def _warnings_to_log() -> Iterator[None]:
    """Send warnings to the log of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: LOG.warning(str(message))
        yield


def _class_names(deployment: Mapping[str, Any]) -> list[str]:
    """The names of all classes, which the settings separate by commas."""
    return [name.strip() for name in str(deployment["classes"]).split(",") if name.strip()]
