"""Short labels of runs: what differs among those that are shown."""

from collections import Counter
from collections.abc import Sequence

from fedcog.data.sources.locations import short_name
from fedcog.report.markup import printable
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.summary import differing, result_settings

MAX_LENGTH = 30
"""Characters of a label."""
NUM_LAST = 12
"""Characters of the end of a long text that a label keeps; there is the seed."""


def short_labels(runs: Sequence[tuple[int, str, Experiment | None]]) -> list[str]:
    """Return a label of each run, at most `MAX_LENGTH` characters, all different.

    Args:
        runs: Number, name and experiment of each run; None if its settings cannot be read.

    Returns:
        The algorithm and the settings that differ among the runs, the seed last, or the name of a
        run without settings. Long texts are cut in the middle. Equal ones end in the run's number.
    """
    known = [experiment for _, _, experiment in runs if experiment is not None]
    settings = [result_settings(one) | {"seed": one.seed} for one in known]
    names = differing(settings)
    shows_algorithm = not names or len({algorithm_name(one.algorithm) for one in known}) > 1
    if "seed" in names:
        names = [*(name for name in names if name != "seed"), "seed"]
    texts = [
        name if experiment is None else _text(experiment, names, shows_algorithm)
        for _, name, experiment in runs
    ]
    labels = [_cut(printable(text), MAX_LENGTH) for text in texts]
    counts = Counter(labels)
    return [
        f"{_cut(label, MAX_LENGTH - len(end))}{end}" if counts[label] > 1 else label
        for label, end in zip(labels, (f" #{number}" for number, _, _ in runs), strict=True)
    ]


def _text(experiment: Experiment, names: Sequence[str], shows_algorithm: bool) -> str:
    """Return the values of some settings in words."""
    settings = result_settings(experiment) | {"seed": experiment.seed}
    parts = [algorithm_name(experiment.algorithm)] if shows_algorithm else []
    for name in names:
        if name in settings:
            key = name.rpartition(".")[2]
            value = str(settings[name])
            if key == "dataset":
                value = short_name(value)
            is_name = key in ("dataset", "model", "partition")
            parts.append(value if is_name else f"{key} {value}")
    return ", ".join(parts)


def _cut(text: str, length: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= length:
        return text
    return f"{text[: length - NUM_LAST - 1]}…{text[-NUM_LAST:]}"
