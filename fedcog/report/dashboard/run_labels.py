"""Short labels of runs: what differs among those that are shown."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedcog.data.sources.locations import short_name
from fedcog.report.markup import printable
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.summary import distinguishing_settings, run_settings

MAX_LENGTH = 30
"""Characters of a label."""
NAMED_BY_VALUE = ("dataset", "data", "model", "network", "partition")
"""Settings whose values need no name; they come first."""
NUM_LAST = 12
"""Characters of the end of a long text that a label keeps; there is the seed."""


def short_labels(runs: Sequence[tuple[int, str, Run | None]]) -> list[str]:
    """Return a label of each run, at most `MAX_LENGTH` characters, all different.

    Args:
        runs: Number, name and content of each run; None if its settings cannot be read.

    Returns:
        The algorithm and the settings that differ among the runs, the seed last, or the name of a
        run without settings. Where these are too long, only settings with an unusual value are
        shown, then texts are cut in the middle. Of runs with equal labels, only the settings in
        which they differ are shown. Equal ones end in the run's number.
    """
    known = [run for _, _, run in runs if run is not None]
    settings = [_settings(run) for run in known]
    names = sorted(distinguishing_settings(settings), key=_rank)
    usual = {name: _most_common(settings, name) for name in names}
    shows_algorithm = not names or len({_algorithm(run) for run in known}) > 1
    labels = []
    for _, name, run in runs:
        text = name
        if run is not None:
            text = _text(run, names, shows_algorithm)
            if len(text) > MAX_LENGTH:
                unusual = [key for key in names if _is_shown(key, _settings(run), usual)]
                text = _text(run, unusual, shows_algorithm or not {*unusual} - {"seed"})
        labels.append(_cut(printable(text), MAX_LENGTH))
    labels = _told_apart(labels, [run for _, _, run in runs])
    counts = Counter(labels)
    return [
        f"{_cut(label, MAX_LENGTH - len(end))}{end}" if counts[label] > 1 else label
        for label, end in zip(labels, (f" #{number}" for number, _, _ in runs), strict=True)
    ]


def _told_apart(labels: Sequence[str], runs: Sequence[Run | None]) -> list[str]:
    """Replace equal labels by what differs among their runs, if anything does."""
    found = list(labels)
    members: dict[str, dict[int, Run]] = {}
    for row, (label, run) in enumerate(zip(labels, runs, strict=True)):
        if run is not None:
            members.setdefault(label, {})[row] = run
    for alike in members.values():
        names = distinguishing_settings([_settings(run) for run in alike.values()])
        if names:
            for row, run in alike.items():
                text = _text(run, sorted(names, key=_rank), shows_algorithm=True)
                found[row] = _cut(printable(text), MAX_LENGTH)
    return found


def _settings(run: Run) -> dict[str, Any]:
    return run_settings(run) | {"seed": run.experiment.seed}


def _algorithm(run: Run) -> str:
    return algorithm_name(run.experiment.algorithm)


def _rank(name: str) -> tuple[int, str]:
    """Sort what readers know a run by first, and the seed last."""
    if name in NAMED_BY_VALUE:
        return NAMED_BY_VALUE.index(name), name
    return len(NAMED_BY_VALUE) + (name == "seed"), name


def _most_common(settings: Sequence[dict[str, Any]], name: str) -> str:
    """Return the representation of a setting's most common value."""
    return Counter(repr(own[name]) for own in settings if name in own).most_common(1)[0][0]


def _is_shown(name: str, settings: dict[str, Any], usual: dict[str, str]) -> bool:
    """Whether a long label shows a setting: the seed, or an unusual value."""
    return name == "seed" or (name in settings and repr(settings[name]) != usual[name])


def _text(run: Run, names: Sequence[str], shows_algorithm: bool) -> str:
    """Return the values of some settings in words."""
    settings = _settings(run)
    parts = [_algorithm(run)] if shows_algorithm else []
    for name in names:
        value = str(settings.get(name, ""))
        key = name.rpartition(".")[2]
        if not value or (key in ("data", "network") and value == "none"):
            continue
        if key == "dataset":
            value = short_name(value)
        parts.append(value if key in NAMED_BY_VALUE else f"{key} {value}")
    return ", ".join(parts)


def _cut(text: str, length: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= length:
        return text
    return f"{text[: length - NUM_LAST - 1]}…{text[-NUM_LAST:]}"
