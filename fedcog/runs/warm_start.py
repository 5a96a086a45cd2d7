"""Warm starts: a run takes over the rounds of another, so that methods share one start."""

import torch

from fedcog.core import tree
from fedcog.core.tree import State
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup

FREE_SETTINGS = {"algorithm", "rounds", "evaluate_every", "evaluate_local", "checkpoint_every"}
"""Settings in which a run and its start may differ."""


class MissingStart(RecordError):
    """The start has no checkpoint; another process may have deleted it."""


def inherit(directory: RunDirectory, setup: ExperimentSetup, start: RunDirectory) -> Checkpoint:
    """Take over the rounds of a finished run, and record them as this run's own.

    Server and clients keep the parts of their states that have the same name. The rest is as before
    the first round.

    Args:
        directory: The new run.
        setup: Its setup.
        start: The finished run.

    Returns:
        The checkpoint that the new run continues from.

    Raises:
        RecordError: If the finished run does not fit.
    """
    experiment = setup.experiment
    start_experiment = start.experiment()
    checkpoint = start.load()
    if checkpoint is None:
        raise MissingStart(
            f"the run in {start.path} is not finished, or its checkpoint was deleted: it must run "
            "again."
        )
    problem = f"the run in {start.path} cannot be the start of this one:"
    is_finished = checkpoint.round == start_experiment.rounds
    if not is_finished or start_experiment.rounds > experiment.rounds:
        raise RecordError(f"{problem} it is not finished, or longer. Delete it, and it runs again.")
    if changed := changed_settings(experiment, start_experiment):
        raise RecordError(f"{problem} it differs in {', '.join(changed)}.")
    if experiment.async_buffer:
        raise RecordError(
            f"{problem} answers of its clients are still on their way. Set --async-buffer 0."
        )
    info = setup.checkpoint_info
    if any(checkpoint.info.get(key) != info[key] for key in ("data", "network")):
        raise RecordError(f"{problem} its data or network differ.")
    algorithm = experiment.algorithm
    start_states = tree.unflatten(checkpoint.clients)
    start_server = tree.to(checkpoint.server, setup.device)
    init = setup.simulator.federation_init(algorithm)._replace(params=start_server["params"])
    try:
        server = _overlay(algorithm.server_init(init), start_server)
        new_state = algorithm.client_init(algorithm.broadcast(server))
        clients = {
            str(client_id): _overlay(new_state, start_states[str(client_id)])
            for client_id in sorted(checkpoint.client_ids)
        }
    except ValueError as error:
        raise RecordError(f"{problem} {error}.") from error
    inherited = Checkpoint(
        checkpoint.round, server, tree.flatten(clients), info, checkpoint.virtual
    )
    directory.copy_rounds(start, checkpoint.round)
    if directory.is_due(inherited):
        directory.save(inherited)
    return inherited


def changed_settings(experiment: Experiment, start: Experiment) -> list[str]:
    """Return the settings that decide the results and differ, apart from FREE_SETTINGS.

    Args:
        experiment: The new run's experiment.
        start: The experiment that it starts from.

    Returns:
        Names of settings.
    """
    mine = experiment.identifying_settings()
    theirs = start.identifying_settings()
    tables = {
        key for values in (mine, theirs) for key, value in values.items() if isinstance(value, dict)
    }
    compared = (mine.keys() | theirs.keys()) - FREE_SETTINGS - tables
    return sorted(key for key in compared if mine.get(key) != theirs.get(key))


def _overlay(fresh: State, known: State) -> State:
    """Replace parts of a fresh state by known ones of the same name and form.

    The other parts are copied, because all new clients share one fresh state.
    """
    for name in fresh.keys() & known.keys():
        if tree.specs({name: fresh[name]}) != tree.specs({name: known[name]}):
            raise ValueError(
                f"its {name} belong to another network, or to an algorithm that adds some"
            )
    missing = {name: value for name, value in fresh.items() if name not in known}
    combined = tree.apply(torch.clone, missing) | known
    return {name: combined[name] for name in fresh}
