"""A run that goes on from where another ended: several methods compared from one and the same start."""

import torch

from fedcog import tree
from fedcog.experiments.config import Experiment
from fedcog.experiments.prepare import Prepared
from fedcog.experiments.record import Checkpoint, RecordError, RunDirectory
from fedcog.tree import State

FREE = {"algorithm", "rounds", "evaluate_every", "evaluate_local", "checkpoint_every"}
"""Settings in which a run and its start may differ."""


class NoStart(RecordError):
    """A start that has gone: another process may have been done with it."""


def inherit(directory: RunDirectory, prepared: Prepared, start: RunDirectory) -> Checkpoint:
    """The first rounds of a run, taken over from the finished run `start`, written down as its own.

    Server and clients have of their states what they had there under the same name, and the rest as it would be were
    this the first round.
    """
    experiment, begun, checkpoint = prepared.experiment, start.experiment(), start.load()
    if checkpoint is None:
        raise NoStart(f"the run in {start.path} is not finished, or its checkpoint is gone: it must be run again.")
    if checkpoint.round != begun.rounds or begun.rounds > experiment.rounds:
        raise RecordError(
            f"the run in {start.path} is no start for this one: it is not finished, or longer. Delete it, and it "
            "is run again."
        )
    if differ := differing(experiment, begun):
        raise RecordError(f"the run in {start.path} is no start for this one: it differs in {', '.join(differ)}.")
    if any(checkpoint.about.get(key) != prepared.about[key] for key in ("data", "network")):
        raise RecordError(f"the run in {start.path} is no start for this one: its data or network were others.")
    algorithm, kept = experiment.algorithm, tree.unflatten(checkpoint.clients)
    begun_server = tree.to(checkpoint.server, prepared.device)
    origin = prepared.backend.origin(algorithm)._replace(params=begun_server["params"])
    try:
        server = _overlaid(algorithm.server_init(origin), begun_server)
        newcomer = algorithm.client_init(algorithm.broadcast(server))
        clients = {str(client): _overlaid(newcomer, kept[str(client)]) for client in sorted(checkpoint.known)}
    except ValueError as error:
        raise RecordError(f"the run in {start.path} is no start for this one: {error}.") from error
    own = Checkpoint(checkpoint.round, server, tree.flatten(clients), prepared.about)
    directory.adopt(start, checkpoint.round)
    if directory.due(own):
        directory.save(own)
    return own


def _overlaid(fresh: State, known: State) -> State:
    """A fresh state with what is known under the same name in its place; both must be of the same form.

    The rest of it is in memory of its own: newcomers all have the same.
    """
    for name in fresh.keys() & known.keys():
        if tree.forms({name: fresh[name]}) != tree.forms({name: known[name]}):
            raise ValueError(f"its {name} are of another network, or of an algorithm with some of its own")
    own = tree.apply(torch.clone, {name: value for name, value in fresh.items() if name not in known})
    return {name: (own | known)[name] for name in fresh}


def differing(experiment: Experiment, begun: Experiment) -> list[str]:
    """The settings that matter to the results and are not the same in both, but for those that may differ."""
    mine, theirs = experiment.telling(), begun.telling()
    tables = {key for both in (mine, theirs) for key, value in both.items() if isinstance(value, dict)}
    return sorted(key for key in (mine.keys() | theirs.keys()) - FREE - tables if mine.get(key) != theirs.get(key))
