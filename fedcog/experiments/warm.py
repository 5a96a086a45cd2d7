"""A run that goes on from where another ended: several methods compared from one and the same start."""

import torch
from torch import Tensor

from fedcog import tree
from fedcog.experiments.config import Experiment
from fedcog.experiments.prepare import Prepared
from fedcog.experiments.record import Checkpoint, RecordError, RunDirectory
from fedcog.tree import State

FREE = {"algorithm", "rounds", "evaluate_every", "evaluate_local", "checkpoint_every"}
"""Settings in which a run and its start may differ."""


def inherit(directory: RunDirectory, prepared: Prepared, start: RunDirectory) -> Checkpoint:
    """The first rounds of a run, taken over from the finished run `start`, written down as its own.

    Server and clients have of their states what they had there under the same name, and the rest as it would be were
    this the first round.
    """
    experiment, begun, checkpoint = prepared.experiment, start.experiment(), start.load()
    if checkpoint is None or checkpoint.round != begun.rounds or begun.rounds > experiment.rounds:
        raise RecordError(
            f"the run in {start.path} is no start for this one: it is not finished, or longer. Delete it, and it "
            "is run again."
        )
    if differ := differing(experiment, begun):
        raise RecordError(f"the run in {start.path} is no start for this one: {', '.join(differ)} differ.")
    if any(checkpoint.about.get(key) != prepared.about[key] for key in ("data", "network")):
        raise RecordError(f"the run in {start.path} is no start for this one: its data or network were others.")
    algorithm, device = experiment.algorithm, prepared.device
    server = _overlaid(_fresh(prepared, checkpoint), tree.to(checkpoint.server, device))
    newcomer = algorithm.client_init(algorithm.broadcast(server))
    kept = tree.unflatten(tree.to(checkpoint.clients, device))
    own_states = {client: _overlaid(newcomer, kept[str(client)]) for client in sorted(checkpoint.known)}
    clients = tree.flatten({str(client): state for client, state in own_states.items()})
    server, clients = (tree.apply(torch.clone, state) for state in (server, clients))  # newcomers are all one tensor
    own = Checkpoint(checkpoint.round, server, clients, prepared.about)
    directory.adopt(start, checkpoint.round)
    directory.save(own)
    return own


def _fresh(prepared: Prepared, checkpoint: Checkpoint) -> State:
    """The server that would begin with a checkpoint's model."""
    begun = {name: tree.to(checkpoint.server[name], prepared.device) for name in ("params", "buffers")}
    fits = all(tree.forms(begun[name]) == tree.forms(prepared.server[name]) for name in begun)
    if not fits:
        raise RecordError("the start is of another network, or an algorithm with parameters of its own.")
    origin = prepared.backend.origin(prepared.experiment.algorithm)
    return prepared.experiment.algorithm.server_init(origin._replace(params=begun["params"])) | begun


def _overlaid(fresh: State, known: State) -> State:
    """A fresh state with what is known under the same name and form in its place."""
    return {
        name: known[name] if name in known and _form(known[name]) == _form(value) else value
        for name, value in fresh.items()
    }


def _form(value: Tensor | State) -> object:
    return tree.forms(value if isinstance(value, dict) else {"": value})


def differing(experiment: Experiment, begun: Experiment) -> list[str]:
    """The settings that matter to the results and are not the same in both, but for those that may differ."""
    mine, theirs = experiment.telling(), begun.telling()
    tables = {key for both in (mine, theirs) for key, value in both.items() if isinstance(value, dict)}
    return sorted(key for key in (mine.keys() | theirs.keys()) - FREE - tables if mine.get(key) != theirs.get(key))
