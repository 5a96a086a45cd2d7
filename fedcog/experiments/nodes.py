"""An experiment whose clients are nodes of Flower: the same run and record, but every client answers a message."""

import contextlib
import functools
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from fedcog.experiments.config import Experiment, generating, layers, name_of, read_experiment
from fedcog.experiments.prepare import Prepared, surroundings
from fedcog.experiments.turns import Running, Turn
from fedcog.federation import masking
from fedcog.federation.rounds import Diverged, round_half_up
from fedcog.settings import ConfigError
from fedcog.tree import State

if TYPE_CHECKING:
    from fedcog.experiments.run import Run
    from fedcog.federation.flower import Nodes, Ready


OWN: dict[str, Any] = {"out": "runs/federation", "patience": 600.0, "data": "", "classes": ""}
"""Settings of a deployment beside those of an experiment: where the server's record goes, how many seconds it waits for
an answer, where its test examples lie, and the names of all classes; the last two where the data are the nodes' own."""


def flows(experiment: Experiment) -> bool:
    """Are the clients nodes of Flower? So they are, too, where what they send is to be masked."""
    return experiment.backend == "flower" or experiment.secure_aggregation


def check_flower(experiment: Experiment) -> None:
    """Refuse what cannot be carried out on Flower, all faults at once."""
    faults = check_nodes(experiment)
    if "custom" in (experiment.dataset, experiment.model, generating(experiment.algorithm).generator):
        faults.append("data or networks of your own do not reach Flower's nodes yet: set --backend simulator.")
    for name, layer in layers(experiment.algorithm):
        if not type(layer).__module__.startswith("fedcog."):
            faults.append(f"{name} is an algorithm of your own, unknown to Flower's nodes: set --backend simulator.")
    try:
        from fedcog.federation import flower  # noqa: F401
    except ImportError:
        faults.append("--backend flower needs Flower: pip install 'fedcog[flower]'.")
    if any(letter.isspace() for letter in sys.executable):  # it would wait for them for ever
        faults.append(
            "Flower's simulation engine runs on Ray, which starts no process by a path with a space, such as this "
            f"Python's, {sys.executable}: install fedcog into an environment elsewhere, or set --backend simulator."
        )
    if faults:
        raise ConfigError(faults)


def check_deployed(experiment: Experiment, own_data: bool) -> list[str]:
    """What stands in the way of a deployment, in which nodes may have data of their own."""
    faults = check_nodes(experiment)
    if own_data and experiment.privacy == "off" and experiment.weights != "uniform" and not experiment.weight_cap:
        faults.append(
            "clients count by their examples, and nobody knows who has most: set --weight-cap, the number of examples "
            "from which on a client counts in full, or --weights uniform."
        )
    if experiment.pretrained_generator or generating(experiment.algorithm).generator == "custom":
        faults.append(
            "nodes are sent the model alone, and no generator: set --fedcog.generator conv, which begins afresh, and "
            "no --pretrained-generator."
        )
    if experiment.checkpoint_every != 1:
        faults.append("nodes remember their last round alone: set --checkpoint-every 1.")
    return faults


def check_nodes(experiment: Experiment) -> list[str]:
    """What stands in the way of secure aggregation, if it is asked for, and of clients that are nodes at all."""
    faults = []
    if experiment.selection != "uniform" and not experiment.secure_aggregation:
        faults.append(
            "power-of-choice asks clients for their loss, which nodes are not asked: set --selection uniform."
        )
    if not experiment.secure_aggregation:
        return faults
    if experiment.algorithm.uplink != "sum":
        faults.append(
            f"{name_of(experiment.algorithm)} needs what every client sends apart, and secure aggregation shows the "
            "server nothing but the sum: choose an algorithm whose uplink is a sum (fedcog list algorithms)."
        )
    if experiment.selection != "uniform":
        faults.append(
            "power-of-choice needs every client's loss in clear, and secure aggregation shows the server nothing but "
            "the sum: set --selection uniform."
        )
    count = max(1, round_half_up(experiment.participation * experiment.clients))
    if not 3 <= count <= 2**16:
        faults.append(
            f"secure aggregation needs from 3 to 65536 clients a round, not {count}: among two, each would know the "
            "other's, and among more, sums would be too coarse. Set --clients or --participation."
        )
    return faults


def on_flower(running: Running) -> "Run | Diverged":
    """The run that is carried out, its clients played by nodes of Flower's simulation engine."""
    from fedcog.federation import flower

    with contextlib.closing(running):
        try:
            turn = next(running)
        except StopIteration as end:  # it was finished already
            return cast("Run", end.value)
        experiment, backend, _ = turn
        ended: list[Run | BaseException] = []

        def serve(nodes: "Nodes") -> None:  # in a thread of Flower's
            with surroundings(experiment.threads, experiment.tf32):
                try:
                    ended.append(driven(running, turn, nodes))
                except BaseException as error:
                    ended.append(error)

        settings = json.dumps(experiment.to_dict())
        here = flower.Ready(backend, experiment.algorithm, secure(experiment))
        check_scales(here, turn.work.shared)
        flower.simulate(serve, here, functools.partial(ready, settings))
    if not ended:
        raise RuntimeError("Flower's simulation engine ended before the run did: its log tells more.")
    if isinstance(ended[0], BaseException) and not isinstance(ended[0], Diverged):
        raise ended[0]
    return ended[0]


def driven(running: Running, turn: Turn, nodes: "Nodes") -> "Run":
    """The run, each of its rounds gathered from the nodes."""
    try:
        while True:
            turn = running.send(nodes.gather(turn.work))
    except StopIteration as end:
        return cast("Run", end.value)


def check_scales(ready: "Ready", shared: State) -> None:
    """Refuse secure aggregation of what no scale is declared for."""
    if ready.secure:
        form = ready.simulation.form(ready.algorithm, shared)["total"]
        if lacking := masking.lacking(form, ready.algorithm.scales):
            raise ConfigError([f"{name_of(ready.algorithm)}.scales has none for '{part}'." for part in lacking])


def secure(experiment: Experiment) -> float:
    """What the scales of secure aggregation are multiplied by; 0: there is none."""
    return experiment.secure_scale if experiment.secure_aggregation else 0.0


@functools.lru_cache(maxsize=1)
def ready(settings: str) -> "Ready":
    """An experiment, by its settings in JSON, made ready for one client after another on one thread."""
    from fedcog.federation.flower import Ready

    torch.set_num_threads(1)
    experiment = read_experiment(json.loads(settings))
    prepared = Prepared(replace(experiment, mapping="loop", workers=1, threads=1))
    return Ready(prepared.backend, experiment.algorithm, secure(experiment))
