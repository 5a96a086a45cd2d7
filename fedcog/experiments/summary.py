"""What several runs say together: groups that differ in the seed alone, means and deviations."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedcog.experiments.config import Experiment, name_of
from fedcog.experiments.run import Run
from fedcog.task import MEASURES, Measure


class Spread(NamedTuple):
    """A mean over seeds, with the sample standard deviation where there are two or more."""

    mean: float
    deviation: float | None
    number: int

    def percent(self) -> str:
        """As printed: 61.25 ± 0.30."""
        return f"{100 * self.mean:.2f}" + ("" if self.deviation is None else f" ± {100 * self.deviation:.2f}")


class Group(NamedTuple):
    """Runs of one experiment that differ in the seed alone."""

    label: str
    runs: list[Run]

    @property
    def last(self) -> Spread:
        """The measure on the test set after the last round."""
        return spread([run.last for run in self.runs])

    @property
    def best(self) -> Spread:
        """Its highest of any round."""
        return spread([run.best for run in self.runs])

    @property
    def personal(self) -> tuple[Spread, Spread] | None:
        """Last and best of the clients' own models on their own label mix; None where nobody measured it."""
        if not all(run.personal for run in self.runs):
            return None
        return spread([run.personal[-1] for run in self.runs]), spread([max(run.personal) for run in self.runs])


COLUMNS = ("algorithm", "last", "best", "personal last", "personal best", "seeds", "rounds")


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row of COLUMNS for every group of runs: scores in %, mean and deviation over seeds."""
    return [row(each) for each in group([run for run in runs if run.scores or run.diverged])]


def row(each: Group) -> tuple[str, ...]:
    """The row of one group."""
    rounds = sorted({len(run.lines) for run in each.runs})
    scored = all(run.scores for run in each.runs)
    last, best = (each.last.percent(), each.best.percent()) if scored else ("", "")
    own = [one.percent() for one in each.personal] if each.personal else ["", ""]
    shown = "-".join(str(round) for round in dict.fromkeys((rounds[0], rounds[-1])))
    lost = sum(bool(run.diverged) for run in each.runs)
    shown += f", {lost} diverged" if lost else ""
    return each.label, last, best, *own, str(len(each.runs)), shown


def markdown(runs: Sequence[Run]) -> str:
    """The same as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows(runs)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by experiment and, as far as they are judged, by their measure, in the order they come."""
    found: dict[tuple[str, Measure], list[Run]] = {}
    each = [(repr(_but_seed(run.experiment)), run) for run in {run.path: run for run in runs}.values()]
    judged = {same: run.measure for same, run in each if run.scores}
    for same, run in each:
        measure = run.measure if run.scores else judged.get(same, run.measure)
        found.setdefault((same, measure), []).append(run)
    names = labels([members[0].experiment for members in found.values()])
    if len({measure for _, measure in found}) > 1:
        names = [f"{name}, {MEASURES[measure]}" for name, (_, measure) in zip(names, found, strict=True)]
    return [Group(label, members) for label, members in zip(names, found.values(), strict=True)]


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """What tells experiments apart: the algorithm's name, and the settings that differ between them."""
    told = [flat(_but_seed(experiment)) for experiment in experiments]
    keys = {key for settings in told for key in settings} - {"algorithm"}
    telling = sorted(key for key in keys if len({repr(settings[key]) for settings in told if key in settings}) > 1)
    found = []
    for experiment, settings in zip(experiments, told, strict=True):
        differs = ", ".join(f"{key} {settings[key]}" for key in telling if key in settings)
        found.append(name_of(experiment.algorithm) + (f" ({differs})" if differs else ""))
    return found


def _but_seed(experiment: Experiment) -> dict[str, Any]:
    """The settings that matter to the results, but for the seed."""
    free = {field.name for field in dataclasses.fields(experiment) if not field.metadata.get("identity", True)}
    return {key: value for key, value in experiment.to_dict().items() if key not in free - {"rounds"} | {"seed"}}


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by one name each, an algorithm's own under the algorithm's."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return found
