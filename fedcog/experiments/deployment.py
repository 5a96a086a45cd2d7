"""A federation of machines: the two halves of an experiment as Flower runs them, a server and its nodes.

An app of Flower names them and its settings are the experiment's; `examples/flower-app` is one.
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
from fedcog.data import Dataset, places
from fedcog.experiments.config import Experiment, name_of, read_experiment
from fedcog.experiments.nodes import OWN, check_deployed, check_scales, driven, secure
from fedcog.experiments.prepare import Prepared, surroundings
from fedcog.experiments.record import RunDirectory
from fedcog.experiments.run import carry_out
from fedcog.federation.flower import ClientApp, Context, Nodes, Ready, ServerApp
from fedcog.federation.flower import client_app as flower_client
from fedcog.federation.flower import server_app as flower_server
from fedcog.settings import ConfigError
from fedcog.task import MEASURES, measure_of

LOG = logging.getLogger("flwr")  # what Flower shows of a run

Network = Callable[[], nn.Module]


def server_app(network: Network | None = None, algorithms: Sequence[type[Algorithm]] = ()) -> ServerApp:
    """The server's half. `network` makes a network of your own, and `algorithms` are known beside ours."""

    def serve(settings: dict[str, Any], nodes: Callable[[Ready, str, float], Nodes]) -> None:
        experiment, own = read_settings(settings, algorithms)
        with surroundings(experiment.threads, experiment.tf32), _warnings_in_the_log():
            _serve(experiment, own, network, nodes)

    return flower_server(serve)


def client_app(network: Network | None = None, algorithms: Sequence[type[Algorithm]] = ()) -> ClientApp:
    """A node's half, with the same network and algorithms as the server's."""
    return flower_client(functools.partial(_prepare, network, tuple(algorithms)))


def _prepare(network: Network | None, algorithms: tuple[type[Algorithm], ...], context: Context) -> Ready:
    settings, node = json.dumps(dict(context.run_config)), json.dumps(dict(context.node_config))
    return _ready(settings, node, network, algorithms)


@functools.lru_cache(maxsize=1)
def _ready(settings: str, node: str, network: Network | None, algorithms: tuple[type[Algorithm], ...]) -> Ready:
    """An experiment made ready at a node, whose own settings are `node`."""
    experiment, own = read_settings(json.loads(settings), algorithms)
    here: dict[str, Any] = json.loads(node)
    device, threads = str(here.get("device", "auto")), int(here.get("threads", 0))
    change: dict[str, Any] = {"device": device, "threads": threads, "mapping": "loop", "workers": 1}
    change |= {"data_dir": str(here["data-dir"])} if "data-dir" in here else {}
    change |= {"pretrained": ""}  # the server has it, and sends what comes of it
    experiment = replace(experiment, **change)
    data, held = None, None
    if experiment.dataset == "custom":
        data = places.read(str(here.get("data", "")), _classes(own))
        held = {int(here["partition-id"]): torch.arange(len(data.train_y))}
    if threads:
        torch.set_num_threads(threads)
    prepared = Prepared(experiment, data, network() if network else None, held=held, remote=True)
    return Ready(prepared.backend, experiment.algorithm, secure(experiment))


def read_settings(
    settings: Mapping[str, Any], algorithms: Sequence[type[Algorithm]] = ()
) -> tuple[Experiment, dict[str, Any]]:
    """The experiment that the settings of an app describe, and what they say of the deployment itself."""
    own, faults = OWN | {name: value for name, value in settings.items() if name in OWN}, list[str]()
    values: dict[str, Any] = {}
    for path, value in settings.items():
        table, _, name = path.rpartition(".")
        place = values.setdefault(table, {}) if table else values
        if isinstance(place, dict) and path not in OWN:
            place[name] = value
        elif path not in OWN:
            faults.append(f"{path}: {table} is no table of settings.")
    if not isinstance(own["patience"], int | float) or not 0 < own["patience"] < math.inf:
        faults.append(f"patience needs seconds above 0, not {own['patience']!r}.")
    faults += [
        f"{name} needs text, not {own[name]!r}." for name in ("out", "data", "classes") if type(own[name]) is not str
    ]
    known = ALGORITHMS | {cls.__name__: cls for cls in algorithms}
    experiment = read_experiment(values, faults, known)
    experiment = replace(experiment, backend="flower")
    if experiment.dataset == "custom":  # nobody but a client knows what it holds, and its model is tried on nothing
        experiment = replace(experiment, evaluate_local=False, partition="given")
    if faults := check_deployed(experiment, experiment.dataset == "custom"):
        raise ConfigError(faults)
    return experiment, own


def _serve(
    experiment: Experiment,
    own: dict[str, Any],
    network: Network | None,
    nodes: Callable[[Ready, str, float], Nodes],
) -> None:
    """Carry the run out, or go on with it where its record ends."""
    data: Dataset | None = places.read(str(own["data"]), _classes(own)) if experiment.dataset == "custom" else None
    rounds = experiment.rounds

    def watch(_: Experiment, line: dict[str, Any]) -> None:
        measure = measure_of(line)
        score = f", {MEASURES[measure]} {line[measure]:.2%}" if line.get(measure) is not None else ""
        loss = f": loss {line['loss']:.4f}" if math.isfinite(line["loss"]) else ""
        spent = f", epsilon {line['privacy']['epsilon']:.3g}" if "privacy" in line else ""
        LOG.info(f"round {line['round']} of {rounds}{loss}{score}{spent}")

    module = network() if network else None
    running = carry_out(
        experiment, own["out"], data=data, model=module, resume=True, watch=watch, command="flwr run", remote=True
    )
    try:
        turn = next(running)
    except StopIteration as end:
        run = end.value
        LOG.info(f"{run.path} holds all {rounds} rounds already: set another out to begin anew.")
        return
    ready = Ready(turn.backend, experiment.algorithm, secure(experiment))
    check_scales(ready, turn.work.shared)
    started = RunDirectory(own["out"]).provenance().get("started", "")
    name = hashlib.sha256(f"{experiment.identity} {started}".encode()).hexdigest()[:16]
    LOG.info(f"{name_of(experiment.algorithm)}: waiting for {experiment.clients} nodes")
    run = driven(running, turn, nodes(ready, name, float(own["patience"])))
    from fedcog.experiments.report import page  # draws: loads matplotlib

    RunDirectory(run.path).save_report(page([run.path]))
    LOG.info(f"done: {run.path / 'report.html'}")


@contextlib.contextmanager
def _warnings_in_the_log() -> Iterator[None]:
    """Within it, what is warned of goes where the run's other words go."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: LOG.warning(str(message))
        yield


def _classes(own: Mapping[str, Any]) -> list[str]:
    """The names of all classes, given with commas between them."""
    return [name.strip() for name in str(own["classes"]).split(",") if name.strip()]
