"""An experiment whose clients are nodes of Flower: the same run and record, but every client answers a message."""

import contextlib
import functools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from fedcog.experiments.config import Experiment, layers, read_experiment
from fedcog.experiments.prepare import Prepared, surroundings
from fedcog.experiments.turns import Running, Turn
from fedcog.federation.rounds import Diverged
from fedcog.settings import ConfigError

if TYPE_CHECKING:
    from fedcog.experiments.run import Run
    from fedcog.federation.flower import Nodes, Ready


def check_flower(experiment: Experiment) -> None:
    """Refuse what cannot be carried out on Flower, all faults at once."""
    faults = []
    if "custom" in (experiment.dataset, experiment.model):
        faults.append("data or a network of your own does not reach Flower's nodes yet: set --backend simulator.")
    for name, layer in layers(experiment.algorithm):
        if not type(layer).__module__.startswith("fedcog."):
            faults.append(f"{name} is an algorithm of your own, unknown to Flower's nodes: set --backend simulator.")
    if experiment.selection != "uniform":
        faults.append(
            "power-of-choice asks clients for their loss, which nodes are not asked: set --selection uniform."
        )
    try:
        from fedcog.federation import flower  # noqa: F401
    except ImportError:
        faults.append("--backend flower needs Flower: pip install 'fedcog[flower]'.")
    if faults:
        raise ConfigError(faults)


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
                    ended.append(_driven(running, turn, nodes))
                except BaseException as error:
                    ended.append(error)

        settings = json.dumps(experiment.to_dict())
        flower.simulate(serve, flower.Ready(backend, experiment.algorithm), functools.partial(ready, settings))
    if not ended:
        raise RuntimeError("Flower's simulation engine ended before the run did: its log tells more.")
    if isinstance(ended[0], BaseException) and not isinstance(ended[0], Diverged):
        raise ended[0]
    return ended[0]


def _driven(running: Running, turn: Turn, nodes: "Nodes") -> "Run":
    """The run, each of its rounds gathered from the nodes."""
    try:
        while True:
            turn = running.send(nodes.gather(turn.work))
    except StopIteration as end:
        return cast("Run", end.value)


@functools.lru_cache(maxsize=1)
def ready(settings: str) -> "Ready":
    """An experiment, by its settings in JSON, made ready for one client after another on one thread."""
    from fedcog.federation.flower import Ready

    torch.set_num_threads(1)
    experiment = read_experiment(json.loads(settings))
    prepared = Prepared(replace(experiment, mapping="loop", workers=1, threads=1))
    return Ready(prepared.backend, experiment.algorithm)
