"""Runs that several processes of torchrun share: one leads, the others follow."""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcog.core.errors import Interrupted
from fedcog.federation.backend import Diverged
from fedcog.federation.torchrun import ProcessGroup, TorchrunBackend
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.setup import ExperimentSetup

if TYPE_CHECKING:
    from fedcog.runs.runner import Runner


@functools.cache
def _process_group() -> ProcessGroup:
    """The processes that torchrun started."""
    return ProcessGroup()


def lead(runner: "Runner") -> Run:
    """Complete a run with the help of all processes, and send them its end.

    Other errors within a round are not sent: this process ends, and torchrun ends the others.

    Raises:
        Diverged: If training diverged.
        Interrupted: If the run was asked to stop.
    """
    backend = TorchrunBackend(_process_group(), runner.setup.simulator)
    runner.server.backend = backend
    outcome: dict[str, Any] = {}
    try:
        finished = runner.run()
        outcome = {"lines": json.dumps(finished.lines)}
        return finished
    except Diverged as error:
        outcome = {"diverged": str(error), "round": error.round}
        raise
    except Interrupted:
        outcome = {"interrupted": True}
        raise
    finally:
        if outcome:
            backend.end(outcome)


def follow(experiment: Experiment, out: Path, objects: UserObjects) -> Run:
    """Help the leader until its run ends, and return that run.

    Args:
        experiment: The experiment.
        out: The run directory, which the leader writes.
        objects: Objects of the user.

    Returns:
        The run as the leader recorded it.

    Raises:
        Diverged: If training diverged at the leader.
        Interrupted: If the leader was asked to stop.
    """
    setup = ExperimentSetup(experiment, objects)
    algorithm = experiment.algorithm
    backend = TorchrunBackend(_process_group(), setup.simulator)
    try:
        outcome = backend.follow(algorithm, algorithm.broadcast(setup.server_state))
    finally:
        setup.simulator.cohort.close()
    if "diverged" in outcome:
        raise Diverged([], outcome["round"], outcome["diverged"])
    if "lines" not in outcome:
        raise Interrupted("stopped")
    return Run(out, experiment, json.loads(outcome["lines"]))
