"""The runner: carries out one experiment round by round and records it."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedcog.core import tree
from fedcog.core.errors import Interrupted
from fedcog.core.settings import ConfigError
from fedcog.data.sources import locations
from fedcog.federation import torchrun
from fedcog.federation.backend import Diverged, RoundRequest, RoundResult
from fedcog.federation.server import Server
from fedcog.federation.simulator import run_stacked_round
from fedcog.models.behavior import is_same
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.config.user_objects import UserObjects, check_objects
from fedcog.runs.divergence import advice
from fedcog.runs.experiment_data import resolve_clients
from fedcog.runs.flower_runs import check_flower, run_on_flower, uses_flower
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.provenance import provenance
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.setup import ExperimentSetup, RemoteClients, load_data
from fedcog.runs.torchrun_runs import lead
from fedcog.runs.tracking import RunStatus, Tracker, Trackers, check_trackers
from fedcog.runs.warm_start import inherit

Callback = Callable[[Experiment, dict[str, Any]], None]
"""Called after every round with the experiment and the round's line of `rounds.jsonl`."""


class NetworkNote(UserWarning):
    """What a user may not expect of a network, such as how it adapts its inputs."""


class RunOptions(NamedTuple):
    """How a run is carried out. None of it changes the results.

    Attributes:
        resume: Whether to continue a run that is already in the directory.
        callbacks: Called after every round.
        should_stop: Asked after every round; if true, the run saves a checkpoint and stops.
        command: The command line to record; Python's by default.
        trackers: Names of trackers, or tracker objects.
    """

    resume: bool = False
    callbacks: Sequence[Callback] = ()
    should_stop: Callable[[], bool] | None = None
    command: str | None = None
    trackers: Sequence[str | Tracker] = ()


class Runner:
    """One run: sets the experiment up, executes rounds, records them. Use it as a context manager.

    Attributes:
        experiment: The experiment, with names for the user's own objects.
        objects: Objects of the user.
        setup: Data, network and simulator.
        server: The server; its backend may be replaced before the first round.
        round: The next round, from 0.
    """

    def __init__(
        self,
        experiment: Experiment,
        out: str | Path | None = None,
        objects: UserObjects | None = None,
        options: RunOptions | None = None,
        *,
        remote: bool = False,
        start_from: Path | None = None,
    ) -> None:
        """Set a run up, or restore it from its last checkpoint.

        Args:
            experiment: The experiment.
            out: The run directory; runs/DATASET-ALGORITHM-SEED by default.
            objects: Objects of the user, instead of what the experiment names.
            options: How the run is carried out.
            remote: Whether clients are remote: their data and states are not here.
            start_from: A finished run whose rounds a new run takes over.

        Raises:
            ConfigError: If the experiment cannot run.
            RecordError: If the directory holds another run.
        """
        self.objects = objects or UserObjects()
        self._options = options or RunOptions()
        self._is_remote = remote
        self._start_from = start_from
        check_trackers(self._options.trackers)
        self.experiment = with_user_objects(experiment, self.objects)
        check_objects(self.experiment, self.objects)
        dataset = self.objects.preloaded
        if dataset is None:
            dataset = load_data(self.experiment, self.objects)
        self.objects = self.objects._replace(preloaded=dataset)
        self.experiment = resolve_clients(self.experiment, dataset)
        if uses_flower(self.experiment) and not remote:
            check_flower(self.experiment)
            self.experiment = dataclasses.replace(self.experiment, backend="flower")
        self.directory = RunDirectory(out or default_directory(self.experiment))
        self._last: Checkpoint | None = None
        self.round: int = 0
        self.server: Server
        self._trackers: Trackers
        self._end: RunStatus = "stopped"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.directory.locked())
            self._open(stack)
            self._exits = stack.pop_all()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End worker processes and trackers, and unlock the directory."""
        self._exits.close()

    @property
    def is_done(self) -> bool:
        """Whether all rounds are finished."""
        return self.round >= self.experiment.rounds

    def run(self) -> Run:
        """Execute all remaining rounds and return the recorded run.

        Raises:
            Diverged: If training diverged; the last good checkpoint is saved.
            Interrupted: If the run was asked to stop.
        """
        while not self.is_done:
            request = self.start_round()
            self.finish_round(request, self.server.backend.run_round(request))
        return self.result()

    def start_round(self) -> RoundRequest:
        """Return what the next round asks of its clients."""
        return self.server.start_round(self.round)

    def finish_round(self, request: RoundRequest, result: RoundResult) -> None:
        """Update the server, record the round, and write a checkpoint if it is due.

        Args:
            request: What the clients were asked.
            result: What they returned.

        Raises:
            Diverged: If training diverged.
            Interrupted: If the run was asked to stop.
        """
        try:
            record, server, artifacts = self.server.finish_round(request, result)
        except Diverged as error:
            self._end = "diverged"
            raise self._record_divergence(error) from None
        self.round = record.round
        states = self.setup.simulator.client_states.flatten()
        clock = self.setup.clock
        self._last = Checkpoint(
            record.round,
            server,
            states,
            self.setup.checkpoint_info,
            None if clock is None else clock.snapshot(),
        )
        if artifacts:
            self.directory.save_artifacts(record.round, self.setup.displayable(artifacts))
        line = record.to_line()
        self.directory.append(line)
        self._trackers.log(line)
        for callback in self._options.callbacks:  # before should_stop, which may depend on them
            callback(self.experiment, line)
        self._checkpoint_or_stop(self._last)

    def interrupt(self) -> None:
        """Save the last finished round, because another run of the stack was asked to stop."""
        if self._last is not None:
            self.directory.save(self._last)

    def result(self) -> Run:
        """Return the finished run."""
        self._end = "finished"
        return Run(
            self.directory.path,
            self.experiment,
            self.directory.lines(),
            user_objects=self.directory.user_objects(),
        )

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Set the experiment up, restore the last checkpoint, and open the trackers."""
        directory = self.directory
        exists = directory.exists()
        if exists:
            _check_same_experiment(directory, self.experiment, self._options.resume)
        elif directory.load() is not None or directory.lines():
            raise RecordError(
                f"{directory.path} holds a run whose experiment.toml is missing: choose another "
                "--out."
            )
        remote = None
        if self._is_remote:
            remote = RemoteClients({} if self.objects.data is not None else None)
        self.setup = ExperimentSetup(self.experiment, self.objects, remote)
        stack.callback(self.setup.simulator.cohort.close)
        for note in self.setup.network_notes:
            warnings.warn(note, NetworkNote, stacklevel=2)
        recorded = directory.provenance()
        has_augmentation = "augmentation" in directory.user_objects()
        if has_augmentation and self.objects.augmentation is None:
            raise RecordError(
                f"the run in {directory.path} uses an augmentation of your own: name it again, "
                "--augmentation FILE.py:Name, or pass it with fedcog.run(..., augmentation=...)."
            )
        self.round = self._restore() if exists else 0
        is_new_start = self._start_from is not None and not self.round
        if "after" in recorded and not self.round and self._start_from is None:
            raise RecordError(
                f"the run in {directory.path} continues another run, and only the command that "
                "started it can continue it."
            )
        if not recorded:
            recorded = provenance(self._options.command, self.setup.device)
            if objects := self.setup.user_object_names:
                recorded |= {"objects": objects}
        if is_new_start:
            assert self._start_from is not None
            start = RunDirectory(self._start_from)
            recorded |= {"after": algorithm_name(start.experiment().algorithm)}
        directory.begin(self.experiment, recorded)
        directory.save_federation(*self.setup.federation_record())
        if is_new_start:
            self.round = self._put_back(inherit(directory, self.setup, start))
        directory.rewind(self.round)
        self.server = self.setup.make_server()
        self._trackers = Trackers(self._options.trackers, directory, self.experiment)
        stack.callback(lambda: self._trackers.close(self._end))

    def _checkpoint_or_stop(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint if it is due, and stop if asked to."""
        should_stop = self._options.should_stop
        is_stopping = should_stop is not None and should_stop() and not self.is_done
        is_interval = checkpoint.round % self.experiment.checkpoint_every == 0
        if self.is_done and self._start_from is not None and checkpoint.is_large:
            # No run continues from this one, and its start is kept.
            self.directory.delete_checkpoint()
        elif self.is_done or is_stopping or (is_interval and self.directory.is_due(checkpoint)):
            self.directory.save(checkpoint)
        if is_stopping:
            raise Interrupted(f"stopped after round {self.round} of {self.experiment.rounds}")

    def _restore(self) -> int:
        """Restore server and client states from the checkpoint; return the finished rounds."""
        directory = self.directory
        checkpoint = directory.load()
        if checkpoint is None:
            return 0
        if checkpoint.round > self.experiment.rounds:
            raise RecordError(
                f"the run in {directory.path} already has {checkpoint.round} rounds: --rounds "
                f"{self.experiment.rounds} would remove some. Choose another --out."
            )
        _check_same_origin(directory, checkpoint, self.setup)
        self._check_states(checkpoint)
        return self._put_back(checkpoint)

    def _check_states(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint whose states have another form."""
        algorithm = self.experiment.algorithm
        server = self.setup.server_state
        new_state = algorithm.client_init(algorithm.broadcast(server))
        clients = {str(client_id): new_state for client_id in checkpoint.client_ids}
        if tree.flatten(new_state) and not clients and not self._is_remote:
            raise RecordError(
                f"the run in {self.directory.path} used Flower, whose nodes have the client states "
                f"of {algorithm_name(algorithm)}: start it again with another --out."
            )
        if self.setup.clock is not None and checkpoint.virtual is None:
            raise RecordError(
                f"the checkpoint in {self.directory.path} has no virtual time: start the run again "
                "with another --out."
            )
        is_same = tree.specs(server) == tree.specs(checkpoint.server)
        stored = tree.unflatten(checkpoint.clients)
        if not is_same or tree.specs(clients) != tree.specs(stored):
            file = self.directory.path / "checkpoint.safetensors"
            raise RecordError(f"{file} does not fit this network: choose another --out.")

    def _put_back(self, checkpoint: Checkpoint) -> int:
        """Continue from a checkpoint; return the finished rounds."""
        self.setup.server_state = tree.to(checkpoint.server, self.setup.device)
        self.setup.simulator.client_states.restore(checkpoint.clients)
        if self.setup.clock is not None and checkpoint.virtual is not None:
            self.setup.clock.restore(checkpoint.virtual, self.setup.device)
        return checkpoint.round

    def _record_divergence(self, error: Diverged) -> Diverged:
        """Save the last good round and record the likely cause."""
        if self._last is not None:  # not the current states, which the failed round may have moved
            self.directory.save(self._last)
        state = "There is no finite round before it."
        if error.round:
            kept = self.directory.checkpoint_round()
            state = f"The checkpoint is that of round {kept}."
            if not kept:
                state = "No checkpoint of an earlier round is kept."
        explained = Diverged(
            error.client_ids, error.round, f"{advice(self.experiment, error)} {state}"
        )
        self.directory.record_failure(str(explained))
        return explained


def round_loop(experiment: Experiment) -> Callable[[Runner], Run]:
    """Return the function that completes a run on the backend that the experiment names.

    Args:
        experiment: The experiment.

    Returns:
        `Runner.run`, or what starts Flower's nodes or leads torchrun's processes around it.

    Raises:
        ConfigError: If torchrun started this process, and the experiment uses Flower or
            asynchronous rounds.
    """
    if torchrun.is_started() and experiment.async_buffer:
        raise ConfigError(
            [
                "torchrun splits the clients of a round among its processes, but under "
                "async_buffer clients start at different times: start fedcog without torchrun, or "
                "set --async-buffer 0."
            ]
        )
    if not uses_flower(experiment):
        return lead if torchrun.is_started() else Runner.run
    if torchrun.is_started():
        raise ConfigError(
            [
                "torchrun splits clients among its processes, and Flower has its own nodes: use "
                "one of them."
            ]
        )
    return run_on_flower


def run_all(runners: Sequence[Runner]) -> list[Run | Diverged]:
    """Complete runs of one experiment that differ in seed, on the backend that it names.

    Args:
        runners: The runs.

    Returns:
        For each, the finished run, or why it diverged.
    """
    complete = round_loop(runners[0].experiment)
    if complete is Runner.run:
        return run_in_step(runners)
    outcomes: list[Run | Diverged] = []
    for runner in runners:
        try:
            outcomes.append(complete(runner))
        except Diverged as error:
            outcomes.append(error)
    return outcomes


def run_in_step(runners: Sequence[Runner]) -> list[Run | Diverged]:
    """Complete runs round by round; clients of the same round train together if that fits.

    A run that diverges ends alone. If one is interrupted, all stop after the same round.

    Args:
        runners: Runs of one experiment that differ in seed and learning rate.

    Returns:
        For each, the finished run, or why it diverged.
    """
    ended: dict[int, Run | Diverged] = {}
    while len(ended) < len(runners):
        for index, runner in enumerate(runners):
            if index not in ended and runner.is_done:
                ended[index] = runner.result()
        active = [index for index in range(len(runners)) if index not in ended]
        if not active:
            break
        next_round = min(runners[index].round for index in active)
        due = [index for index in active if runners[index].round == next_round]
        requests = [runners[index].start_round() for index in due]
        results = _run_requests([runners[index] for index in due], requests)
        interrupted: Interrupted | None = None
        stopped: set[int] = set()
        for index, request, result in zip(due, requests, results, strict=True):
            try:
                runners[index].finish_round(request, result)
            except Diverged as error:
                ended[index] = error
            except Interrupted as error:
                interrupted = error
                stopped.add(index)
        if interrupted is not None:
            for index in active:
                if index not in ended and index not in stopped:
                    runners[index].interrupt()
            raise interrupted
    return [ended[index] for index in range(len(runners))]


def _run_requests(runners: Sequence[Runner], requests: Sequence[RoundRequest]) -> list[RoundResult]:
    """Train the clients of several runs: together, or one run after another if asynchronous."""
    if any(runner.experiment.async_buffer for runner in runners):
        pairs = zip(runners, requests, strict=True)
        return [runner.server.backend.run_round(request) for runner, request in pairs]
    return run_stacked_round([runner.setup.simulator for runner in runners], requests)


def with_user_objects(experiment: Experiment, objects: UserObjects) -> Experiment:
    """Return the experiment with "custom" in place of what the user passed as objects.

    Args:
        experiment: The experiment.
        objects: Objects of the user.

    Returns:
        The experiment as it is recorded.
    """
    changes: dict[str, Any] = {}
    changes["dataset"] = locations.absolute_location(experiment.dataset)
    if objects.data is not None:
        changes["dataset"] = "custom"
    if objects.model is not None:
        changes["model"] = "custom"
    for name in ("pretrained", "pretrained_generator", "indices"):
        if path := getattr(experiment, name):  # absolute, because a run may resume from anywhere
            changes[name] = str(Path(path).expanduser().resolve())
    return dataclasses.replace(experiment, **changes)


def default_directory(experiment: Experiment) -> Path:
    """Return the run directory of an experiment without an explicit one."""
    name = algorithm_name(experiment.algorithm)
    dataset = locations.short_name(experiment.dataset)
    return Path("runs") / f"{dataset}-{name}-{experiment.seed}"


def _check_same_experiment(directory: RunDirectory, experiment: Experiment, resume: bool) -> None:
    """Refuse a directory that holds another run, or one that is not to be resumed."""
    recorded = directory.experiment()
    num_rounds = len(directory.lines())
    if not num_rounds and not resume:  # it failed or diverged in its first round
        return
    if not resume:
        state = ", then it diverged" if directory.failure() else ""
        raise RecordError(
            f"{directory.path} already holds a run ({num_rounds} of {recorded.rounds} rounds"
            f"{state}). Continue it with: fedcog run --resume {directory.path}   or, in Python, "
            "resume=True; or choose another --out."
        )
    if recorded.identity != experiment.identity:
        mine = experiment.identifying_settings()
        theirs = recorded.identifying_settings()
        changed = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        hint = ""
        if changed == ["lr_rounds"]:
            hint = (
                f" Its learning rate decays over {recorded.client_lr.horizon} rounds, and --rounds "
                f"alone would change that: set --lr-rounds {recorded.client_lr.horizon} too."
            )
        raise RecordError(
            f"{directory.path} belongs to another experiment, which differs in "
            f"{', '.join(changed)}. Keep those settings, or start another run.{hint}"
        )


def _check_same_origin(
    directory: RunDirectory, checkpoint: Checkpoint, setup: ExperimentSetup
) -> None:
    """Refuse a checkpoint of another experiment, data set, network or user code."""
    origins = {
        "experiment": "by another experiment",
        "data": "on other data",
        "network": "of another network",
        "code": "by other code of your own algorithm or augmentation",
    }
    differs = [key for key in origins if checkpoint.info.get(key) != setup.checkpoint_info[key]]
    found = [origins[key] for key in differs]
    for role, numbers in checkpoint.info.get("behavior", {}).items():  # earlier versions have none
        if not is_same(numbers, setup.checkpoint_info["behavior"].get(role, [])):
            found.append(f"with another {role}, or other values in it")
    if found:
        file = directory.path / "checkpoint.safetensors"
        raise RecordError(
            f"{file} was made {found[0]}: continue with the same, or start another run."
        )
