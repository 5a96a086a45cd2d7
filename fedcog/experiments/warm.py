"""A run that goes on from where another ended: several methods compared from one and the same start."""

from fedcog import tree
from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.prepare import Prepared
from fedcog.experiments.record import Checkpoint, RecordError, RunDirectory

FREE = {"algorithm", "rounds", "evaluate_every", "evaluate_local", "checkpoint_every"}
"""Settings in which a run and its start may differ."""


def inherit(directory: RunDirectory, prepared: Prepared, start: RunDirectory) -> Checkpoint:
    """The first rounds of a run, taken over from the finished run `start`, written down as its own.

    Clients keep of what they kept there whatever the run's own algorithm has them keep.
    """
    experiment, begun, checkpoint = prepared.experiment, start.experiment(), start.load()
    if checkpoint is None or checkpoint.round != begun.rounds or begun.rounds > experiment.rounds:
        raise RecordError(f"the run in {start.path} is no start for this one: it is not finished, or longer.")
    if differ := differing(experiment, begun):
        raise RecordError(f"the run in {start.path} is no start for this one: {', '.join(differ)} differ.")
    if any(checkpoint.about.get(key) != prepared.about[key] for key in ("data", "network")):
        raise RecordError(f"the run in {start.path} is no start for this one: its data or network were others.")
    algorithm = experiment.algorithm
    newcomer = tree.flatten(algorithm.client_init(algorithm.broadcast(prepared.server)))
    wanted = {f"{client}::{name}" for client in checkpoint.known for name in newcomer}
    clients = {name: value for name, value in checkpoint.clients.items() if name in wanted}
    if clients.keys() != wanted or tree.forms(checkpoint.server) != tree.forms(prepared.server):
        raise RecordError(
            f"the run in {start.path} is no start for {name_of(algorithm)}: {name_of(begun.algorithm)} keeps less."
        )
    own = Checkpoint(checkpoint.round, checkpoint.server, clients, prepared.about)
    directory.adopt(start, checkpoint.round)
    directory.save(own)
    return own


def differing(experiment: Experiment, begun: Experiment) -> list[str]:
    """The settings that matter to the results and are not the same in both, but for those that may differ."""
    mine, theirs = experiment.telling(), begun.telling()
    tables = {key for both in (mine, theirs) for key, value in both.items() if isinstance(value, dict)}
    return sorted(key for key in (mine.keys() | theirs.keys()) - FREE - tables if mine.get(key) != theirs.get(key))
