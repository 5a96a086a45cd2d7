"""An experiment carried out: rounds run, each one written down; and what was written, read again."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.data import Dataset
from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.divergence import advice
from fedcog.experiments.nodes import check_flower, flows, on_flower
from fedcog.experiments.prepare import Prepared, check_runnable, privacy, surroundings
from fedcog.experiments.provenance import provenance
from fedcog.experiments.record import Checkpoint, RecordError, RunDirectory
from fedcog.experiments.torchrun import followed, led
from fedcog.experiments.track import Tracking, chosen
from fedcog.experiments.turns import Interrupted, Running, Turn, in_step
from fedcog.experiments.warm import inherit
from fedcog.federation import ranks
from fedcog.federation.rounds import Diverged, Federation
from fedcog.models import MODELS, build
from fedcog.settings import ConfigError
from fedcog.task import Measure, measure_of

Watch = Callable[[Experiment, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A run as it was recorded."""

    path: Path
    experiment: Experiment
    lines: list[dict[str, Any]]
    diverged: str = ""  # why it ended early, if training left the numbers

    def __repr__(self) -> str:
        scores = f", last {self.last:.4f}, best {self.best:.4f}" if self.scores else ""
        return f"Run({str(self.path)!r}, {name_of(self.experiment.algorithm)}, {len(self.lines)} rounds{scores})"

    @property
    def measure(self) -> Measure:
        """What its model is judged by: accuracy or, where examples have several labels, F1 over all decisions."""
        return next((found for line in self.lines if (found := measure_of(line)) in line), "accuracy")

    @property
    def scores(self) -> list[tuple[int, float]]:
        """(round, measure on the test set) wherever it was taken."""
        name = self.measure
        return [(line["round"], line[name]) for line in self.lines if line.get(name) is not None]

    @property
    def last(self) -> float:
        """The measure on the test set after the last round."""
        return self.scores[-1][1]

    @property
    def best(self) -> float:
        """Its highest of any round: what papers print, and more than one can hope for."""
        return max(score for _, score in self.scores)

    @property
    def personal(self) -> list[float]:
        """The clients' own models on their own label mix, mean over the round's clients, wherever it was measured.

        Of a method that personalises it is that model; of any other the local model before it is averaged, that is the
        global one fine-tuned.
        """
        name = f"personal_{self.measure}"
        return [line[name] for line in self.lines if line.get(name) is not None]

    @property
    def privacy(self) -> str:
        """What of the clients' privacy is spent, in words; empty where none was promised."""
        spent = self.lines[-1].get("privacy") if self.lines else None
        if not isinstance(spent, dict):
            return ""
        known = privacy(self.experiment, self.experiment.clients, bool(spent.get("simulated", True)))
        if known is None:
            return ""
        epsilon = "without bound" if spent.get("epsilon") is None else f"{spent['epsilon']:.3g}"
        kind = "simulated privacy (its noise comes from the seed)" if known.simulated else "privacy"
        return (
            f"{kind}: epsilon {epsilon} at delta {known.delta:g} after {len(self.lines)} rounds, {known.where} "
            f"({known.words}); clipped to {known.clip:g}, noise {known.noise:g} clips"
        )


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    generator: nn.Module | None = None,
    resume: bool = False,
    report: bool = True,
    watch: Watch | None = None,
    stopping: Callable[[], bool] | None = None,
    command: str | None = None,
    track: str | Sequence[str] = (),
) -> Run:
    """Carry out an experiment in the directory `out` (by default runs/DATASET-ALGORITHM-SEED).

    `data` and `model` are your own, in place of those the experiment names, and so is `generator`, which makes inputs
    of noise for FedCOG(generator="custom"). With `resume` a run that lies there is
    continued after its last checkpoint; one that is finished is only read. `watch` is called with the experiment and
    every new round's line; once `stopping` says so, the run ends with `Interrupted` after a whole round. `track` names
    trackers that follow the run: tensorboard, mlflow, wandb. They change nothing of it.
    """
    own: dict[str, Any] = {"data": data, "model": model, "generator": generator, "resume": resume}
    own |= {"watch": watch, "stopping": stopping, "command": command, "track": track}
    if ranks.started() and flows(experiment):
        raise ConfigError(
            ["torchrun shares clients among its processes, and Flower has nodes of its own: use one of them."]
        )
    if ranks.follows():
        with surroundings(experiment.threads, experiment.tf32):
            experiment = with_own(experiment, data, model)
            lines = followed(Prepared(experiment, data, model, generator))
            return Run(Path(out or default_out(experiment)), experiment, lines)
    with surroundings(experiment.threads, experiment.tf32):
        (finished,) = finish(experiment, [carry_out(experiment, out, **own)])
        if isinstance(finished, Diverged):
            raise finished
        if report:
            from fedcog.experiments.report import page  # draws: loads matplotlib

            RunDirectory(finished.path).save_report(page([finished.path]))
        return finished


def carry_out(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    generator: nn.Module | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    stopping: Callable[[], bool] | None = None,
    command: str | None = None,
    track: str | Sequence[str] = (),
    remote: bool = False,
    loaded: Dataset | None = None,
    after: Path | None = None,
) -> Running:
    """An experiment as it is carried out: it asks for each round's gathering, and returns the run as recorded.

    Of `remote` clients nothing is here: neither their data, if those are your own, nor what they keep. `loaded` is
    the data set that the experiment names, where it is at hand. A new run may go on `after` the rounds of a finished
    one; then it leaves no checkpoint behind that is HEAVY.
    """
    experiment, trackers = with_own(experiment, data, model), chosen(track)
    if flows(experiment) and not remote:
        check_flower(experiment)
        experiment = dataclasses.replace(experiment, backend="flower")
    directory = RunDirectory(out or default_out(experiment))
    with directory.locked(), contextlib.ExitStack() as ending:
        if directory.exists():
            _check_same(directory, experiment, resume)
        elif directory.load() is not None or directory.lines():
            raise RecordError(f"{directory.path} holds a run whose experiment.toml is gone: choose another --out.")
        held: dict[int, torch.Tensor] | None = {} if remote and data is not None else None
        prepared = Prepared(experiment, loaded if data is None else data, model, generator, held, remote)
        ending.callback(prepared.backend.cohort.close)
        start = _restore(directory, prepared, remote) if directory.exists() else 0
        if "after" in directory.provenance() and not start and after is None:
            raise RecordError(
                f"the run in {directory.path} goes on from another, and only what began it can continue it."
            )
        told = directory.provenance() or provenance(command, prepared.device)
        if after is not None and not start:
            told |= {"after": name_of(RunDirectory(after).experiment().algorithm)}
        directory.begin(experiment, told)
        directory.save_federation(*prepared.federation())
        if after is not None and not start:
            start = _put_back(prepared, inherit(directory, prepared, RunDirectory(after)))
        directory.rewind(start)
        tracking = Tracking(trackers, directory, experiment)
        ending.callback(tracking.close)
        algorithm, backend = experiment.algorithm, prepared.backend
        federation = Federation(algorithm, backend, prepared, prepared.schedule, prepared.server, prepared.privacy)
        last: Checkpoint | None = None
        for round in range(start, experiment.rounds):
            work = federation.ask(round)
            try:
                gathered = yield Turn(experiment, backend, work)
            except Interrupted:
                if last is not None:
                    directory.save(last)
                raise
            try:
                line, server, exhibit = federation.answer(work, gathered)
            except Diverged as error:
                tracking.end = "diverged"
                raise _told(error, experiment, directory, last) from None
            last = Checkpoint(line["round"], server, backend.store.flatten(), prepared.about)
            if exhibit:
                directory.save_exhibit(line["round"], prepared.shown(exhibit))
            directory.append(line)
            tracking.tell(line)
            if watch:  # before it is asked whether to stop: how long a round took is told here
                watch(experiment, line)
            stop = stopping is not None and stopping() and line["round"] < experiment.rounds
            done = line["round"] == experiment.rounds
            if done and after is not None and last.heavy:  # nothing goes on from it, and its start is kept
                directory.lighten()
            elif done or stop or (line["round"] % experiment.checkpoint_every == 0 and directory.due(last)):
                directory.save(last)
            if stop:
                raise Interrupted(f"stopped after round {line['round']} of {experiment.rounds}")
        tracking.end = "finished"
        return Run(directory.path, experiment, directory.lines())


def with_own(experiment: Experiment, data: Dataset | None, model: nn.Module | None) -> Experiment:
    """The experiment, saying so where data or network are not those it names."""
    own: dict[str, Any] = {"dataset": "custom"} if data is not None else {}
    own |= {"model": "custom"} if model is not None else {}
    if data is not None and data.indices is not None:
        own |= {"partition": "given", "clients": len(data.indices)}
    for name in ("pretrained", "pretrained_generator"):
        if path := getattr(experiment, name):  # a run may be gone on with from anywhere
            own |= {name: str(Path(path).expanduser().resolve())}
    return dataclasses.replace(experiment, **own)


def finish(experiment: Experiment, runs: Sequence[Running]) -> list[Run | Diverged]:
    """Runs of an experiment that differ in their seed, carried out to their ends by the backend it asks for."""
    if flows(experiment):
        return [on_flower(running) for running in runs]
    if ranks.started():
        (running,) = runs
        return [led(running)]
    return in_step(runs)


def load(path: str | Path, model: nn.Module | None = None, algorithm: Algorithm | None = None) -> nn.Module:
    """The trained global model of a run, in evaluation mode; `model` and `algorithm` are your own, where it had any.

    It takes inputs as it was trained on them, normalised; one that takes bytes comes of `export`, as ONNX.
    """
    return trained(RunDirectory(path), model, algorithm)[0]


def trained(
    directory: RunDirectory, model: nn.Module | None = None, algorithm: Algorithm | None = None
) -> tuple[nn.Module, Checkpoint]:
    """The trained global model of a run, in evaluation mode, and the checkpoint it is from."""
    path, experiment, checkpoint = directory.path, directory.experiment(), directory.load()
    if checkpoint is None:
        raise RecordError(f"the run in {path} has no checkpoint yet: wait for its first, or continue it.")
    try:
        name, shape, classes = (checkpoint.about[key] for key in ("model", "input_shape", "classes"))
        if name not in (*MODELS, "custom"):
            raise KeyError(name)
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path / 'checkpoint.safetensors'} tells of no network that is known here.") from error
    if model is None:
        if name == "custom":
            raise RecordError(
                f"the run in {path} trained a network of your own, which only Python knows: give it to "
                f"fedcog.load({str(path)!r}, model=YourNetwork()), or to fedcog.export likewise."
            )
        model = build(name, tuple(shape), classes, experiment.seed)
    known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    moved = {name for name, value in model.named_parameters() if value.requires_grad}
    if algorithm is None and (own := check_runnable(experiment)):
        raise RecordError(
            f"{own[0].partition(':')[0]}: fedcog.load({str(path)!r}, algorithm=...) needs it to tell the model, and so "
            "does fedcog.export."
        )
    weights = (algorithm or experiment.algorithm).server_model(checkpoint.server)
    if not moved <= weights.keys() <= known:
        raise RecordError(f"the network given is not the one the run in {path} trained: its parameters differ in name.")
    model = model.to(torch.float64 if experiment.precision == "float64" else torch.float32)
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in weights.items():
        if places[name].shape != value.shape:
            raise RecordError(f"the network given is not the one the run in {path} trained: '{name}' differs in shape.")
        with torch.no_grad():
            places[name].copy_(value)
    return model.eval(), checkpoint


def read(path: str | Path) -> Run:
    """A run as it is recorded in a directory, finished or not."""
    directory = RunDirectory(path)
    return Run(directory.path, directory.experiment(), directory.lines(), directory.failure())


def default_out(experiment: Experiment) -> Path:
    """Where a run goes that was not told."""
    return Path("runs") / f"{experiment.dataset}-{name_of(experiment.algorithm)}-{experiment.seed}"


def _check_same(directory: RunDirectory, experiment: Experiment, resume: bool) -> None:
    there, rounds = directory.experiment(), len(directory.lines())
    if directory.failure() and not rounds:  # it diverged in its first round: there is nothing to lose
        return
    if not resume:
        raise RecordError(
            f"{directory.path} already holds a run ({rounds} of {there.rounds} rounds"
            f"{', then it diverged' if directory.failure() else ''}). Continue it with: fedcog run "
            f"--resume {directory.path}   or choose another --out."
        )
    if there.identity != experiment.identity:
        mine, theirs = experiment.to_dict(), there.to_dict()
        free = {field.name for field in dataclasses.fields(there) if not field.metadata.get("identity", True)}
        differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key) and key not in free]
        raise RecordError(
            f"{directory.path} belongs to another experiment, which differs in {', '.join(differ)}. Choose another "
            "--out, or leave those settings as they were."
        )


def _restore(directory: RunDirectory, prepared: Prepared, remote: bool) -> int:
    """The rounds already done, with the server's and the clients' state put back as they were then."""
    checkpoint = directory.load()
    if checkpoint is None:
        return 0
    if checkpoint.round > prepared.experiment.rounds:
        raise RecordError(
            f"the run in {directory.path} has {checkpoint.round} rounds already: --rounds {prepared.experiment.rounds} "
            "would take some away. Choose another --out."
        )
    for key, what in {
        "experiment": "by another experiment",
        "data": "on other data",
        "network": "of another network",
        "code": "by other code of an algorithm of your own",
    }.items():
        if checkpoint.about.get(key) != prepared.about[key]:
            file = directory.path / "checkpoint.safetensors"
            raise RecordError(f"{file} was made {what} than this: choose another --out.")
    algorithm = prepared.experiment.algorithm
    newcomer = algorithm.client_init(algorithm.broadcast(prepared.server))
    clients = {str(client): newcomer for client in checkpoint.known}
    if tree.flatten(newcomer) and not clients and not remote:
        raise RecordError(
            f"the run in {directory.path} went on Flower, whose nodes took with them what clients of "
            f"{name_of(algorithm)} keep: begin it again, with another --out."
        )
    mine, theirs = (prepared.server, clients), (checkpoint.server, tree.unflatten(checkpoint.clients))
    if [tree.forms(state) for state in mine] != [tree.forms(state) for state in theirs]:
        raise RecordError(
            f"{directory.path / 'checkpoint.safetensors'} does not fit this network: choose another --out."
        )
    return _put_back(prepared, checkpoint)


def _put_back(prepared: Prepared, checkpoint: Checkpoint) -> int:
    """The rounds of a checkpoint, with everybody's state as it was then."""
    prepared.server = tree.to(checkpoint.server, prepared.device)
    prepared.backend.store.restore(checkpoint.clients)
    return checkpoint.round


def _told(error: Diverged, experiment: Experiment, directory: RunDirectory, last: Checkpoint | None) -> Diverged:
    """Where training diverged: the last good round is saved, and the likely setting named."""
    if last is not None:  # and not the store as it is now: the round that failed may have moved it
        directory.save(last)
    good = "There is no good round before it."
    if error.round:
        kept = directory.rounds()
        good = f"The checkpoint is that of round {kept}." if kept else "No checkpoint of a round before it is kept."
    told = Diverged(error.clients, error.round, f"{advice(experiment, error)} {good}")
    directory.fail(str(told))
    return told
