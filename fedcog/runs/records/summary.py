"""Summaries of several runs: groups that differ in seed only, with mean and standard deviation."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedcog.core.tasks import METRIC_LABELS, Metric
from fedcog.data.sources.locations import distinct_names
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment, free_settings
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import OBJECT_NAMES

COLUMNS = (
    "algorithm",
    "last",
    "best",
    "label mix last",
    "label mix best",
    "client tests",
    "worst 10 %",
    "personal",
    "seeds",
    "rounds",
)
"""Columns of a summary. `client tests`, `worst 10 %` and `personal` are after the last round: the
global model on all clients' own test examples, its mean over the worst tenth of the clients, and
the personal models on all clients' own test examples."""

NOTES = {
    "label mix last": "label mix: the clients' local or personal models on the test set, weighted "
    "by each client's label mix",
    "client tests": "client tests: the global model on all clients' own test examples; worst 10 %: "
    "its mean over the worst tenth of the clients",
    "personal": "personal: the clients' personal models on their own test examples",
}
"""Explanations of columns."""


class Spread(NamedTuple):
    """Mean over seeds, and sample standard deviation if there are at least two.

    Attributes:
        mean: The mean.
        deviation: The sample standard deviation; None for a single value.
        number: Number of values.
    """

    mean: float
    deviation: float | None
    number: int

    def percent(self) -> str:
        """Return the text in percent, such as 61.25 ± 0.30."""
        text = f"{100 * self.mean:.2f}"
        return text if self.deviation is None else f"{text} ± {100 * self.deviation:.2f}"


class Group(NamedTuple):
    """Runs of one experiment that differ in seed only.

    Attributes:
        label: The algorithm's name, and the settings that differ between groups.
        runs: The runs, one per seed.
        repeated: Further runs with a seed of these; they count nowhere.
    """

    label: str
    runs: list[Run]
    repeated: Sequence[Run] = ()

    @property
    def last(self) -> Spread:
        """The score on the test set after the last round."""
        return spread([run.last for run in self.runs])

    @property
    def best(self) -> Spread:
        """The highest score of any round."""
        return spread([run.best for run in self.runs])

    @property
    def label_mix(self) -> tuple[Spread, Spread] | None:
        """Last and best score of the clients' models on their label mix, if measured."""
        if not all(run.label_mix for run in self.runs):
            return None
        last = spread([run.label_mix[-1] for run in self.runs])
        best = spread([max(run.label_mix) for run in self.runs])
        return last, best

    def local_test(self, name: str = "") -> Spread | None:
        """Return a score on the clients' own test examples after the last round.

        Args:
            name: As for `Run.local_test`.

        Returns:
            The score over seeds; None if it was not measured.
        """
        scores = [run.local_test(name) for run in self.runs]
        if not all(scores):
            return None
        return spread([own[-1][1] for own in scores])


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for every group of runs; scores in percent."""
    return [row(one) for one in group([run for run in runs if run.scores or run.diverged])]


def row(group: Group) -> tuple[str, ...]:
    """Return the row of one group."""
    last = ""
    best = ""
    if all(run.scores for run in group.runs):
        last = group.last.percent()
        best = group.best.percent()
    label_mix = [spread.percent() for spread in group.label_mix] if group.label_mix else ["", ""]
    metric = group.runs[0].metric
    names = (metric, f"{metric}_worst", f"personal_{metric}")
    client_tests = [value.percent() if (value := group.local_test(name)) else "" for name in names]
    num_rounds = sorted({len(run.lines) for run in group.runs})
    rounds = "-".join(str(number) for number in dict.fromkeys((num_rounds[0], num_rounds[-1])))
    if num_diverged := sum(bool(run.diverged) for run in group.runs):
        rounds += f", {num_diverged} diverged"
    return group.label, last, best, *label_mix, *client_tests, str(len(group.runs)), rounds


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the positions of the columns in which some row has a value."""
    return [column for column in range(len(COLUMNS)) if any(row[column] for row in rows)]


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def group(runs: Sequence[Run]) -> list[Group]:
    """Group runs by experiment and metric, in order of appearance.

    Of several runs with the same seed in a group, the first counts, and a warning says so.

    Example:
        ```python
        import fedcog

        experiments = [fedcog.Experiment(fedcog.FedProx(), rounds=1, local_steps=5)]
        runs = fedcog.compare(experiments, seeds=[0, 1], out="runs/seeds")
        for group in fedcog.group(runs):
            print(group.label, group.last.percent())
        ```
    """
    unique = {run.path: run for run in runs}.values()
    keyed = [(repr(run_settings(run)), run) for run in unique]
    metrics = {key: run.metric for key, run in keyed if run.scores}
    members: dict[tuple[str, Metric], list[Run]] = {}
    for key, run in keyed:
        metric = run.metric if run.scores else metrics.get(key, run.metric)
        members.setdefault((key, metric), []).append(run)
    firsts = [own[0] for own in members.values()]
    names = _labels([run.experiment for run in firsts], [run_settings(run) for run in firsts])
    if len({metric for _, metric in members}) > 1:
        names = [
            f"{name}, {METRIC_LABELS[metric]}"
            for name, (_, metric) in zip(names, members, strict=True)
        ]
    return [_one_per_seed(name, own) for name, own in zip(names, members.values(), strict=True)]


def _one_per_seed(label: str, runs: Sequence[Run]) -> Group:
    """Make a group in which the first run of each seed counts; warn of the others."""
    counted: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: not run.scores):
        counted.setdefault(run.experiment.seed, run)
    repeated = [run for run in runs if counted[run.experiment.seed] is not run]
    for run in repeated:
        seed = run.experiment.seed
        warnings.warn(
            f"of several runs with seed {seed}, the first counts: {counted[seed].path}, not "
            f"{run.path}.",
            stacklevel=3,
        )
    return Group(label, [run for run in runs if run not in repeated], repeated)


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """Return labels: the algorithm's name, and the settings that differ between experiments."""
    return _labels(experiments, [result_settings(experiment) for experiment in experiments])


def _labels(experiments: Sequence[Experiment], settings: Sequence[dict[str, Any]]) -> list[str]:
    varying = distinguishing_settings(settings)
    datasets = distinct_names([experiment.dataset for experiment in experiments])
    return [
        settings_label(experiment, own | {"dataset": dataset}, varying)
        for experiment, own, dataset in zip(experiments, settings, datasets, strict=True)
    ]


def data_names(runs: Sequence[Run]) -> list[str]:
    """Return short names of the data sets of some runs, which differ where data sets do.

    A digest follows the name only where the same name or location had several contents.
    """
    names = []
    digests = []
    for run in runs:
        name, _, digest = run.user_objects.get("data", "").rpartition("-")
        is_custom = run.experiment.dataset == "custom" and name
        names.append(name if is_custom else run.experiment.dataset)
        digests.append(digest)
    short = distinct_names(names)
    versions: dict[str, set[tuple[str, str]]] = {}
    for shown, name, digest in zip(short, names, digests, strict=True):
        versions.setdefault(shown, set()).add((name, digest))
    return [
        f"{shown}-{digest}" if digest and len(versions[shown]) > 1 else shown
        for shown, digest in zip(short, digests, strict=True)
    ]


def settings_label(
    experiment: Experiment, settings: Mapping[str, Any], names: Sequence[str]
) -> str:
    """Return a label such as 'fedprox (fedprox.mu 0.1, lr 0.01)'.

    Args:
        experiment: The experiment.
        settings: Its settings, flat.
        names: The settings to show; those that are missing or empty are left out.

    Returns:
        The algorithm's name, and the settings in brackets.
    """
    values = ", ".join(f"{name} {settings[name]}" for name in names if settings.get(name, "") != "")
    label = algorithm_name(experiment.algorithm)
    return f"{label} ({values})" if values else label


def result_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that decide the results, flat, and the rounds, without the seed."""
    return flatten_settings(_without_seed(experiment))


def run_settings(run: Run) -> dict[str, Any]:
    """Return the settings that decide a run's results, and the names of the user's objects."""
    objects = {name: run.user_objects.get(name, "none") for name in OBJECT_NAMES}
    return result_settings(run.experiment) | objects


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings, except the algorithm, that have several values, sorted."""
    names = {name for own in settings for name in own} - {"algorithm"}
    return sorted(
        name for name in names if len({repr(own[name]) for own in settings if name in own}) > 1
    )


def distinguishing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of `differing`, without those that say the same again.

    The name of a data set's content says nothing more if each location had one content.
    """
    names = differing(settings)
    locations = {str(own.get("dataset")) for own in settings}
    contents = {(str(own.get("dataset")), own.get("data")) for own in settings}
    if "custom" not in locations and len(locations) == len(contents):
        names = [name for name in names if name != "data"]
    return names


def flatten_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in one dict; an algorithm's as ALGORITHM.SETTING."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _without_seed(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that decide the results and the number of rounds, without the seed."""
    ignored = free_settings() - {"rounds"} | {"seed"}
    return {name: value for name, value in experiment.to_dict().items() if name not in ignored}
