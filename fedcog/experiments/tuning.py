"""A sweep as it is told: its budget in words, and tables of what was chosen and of every trial."""

from collections.abc import Sequence

from fedcog.experiments.space import Point, size
from fedcog.experiments.summary import spread
from fedcog.experiments.sweep import Plan, Trial, Tuned
from fedcog.experiments.tables import Grid
from fedcog.task import MEASURES

KINDS = {"grid": "a grid", "random": "random search", "optuna": "Optuna's TPE"}
DIVERGED = "diverged"


def words(plan: Plan, found: Sequence[Tuned]) -> list[str]:
    """What was done, sentence by sentence: who got how much, what chose, and what is worth knowing of it."""
    (rounds, *others) = dict.fromkeys(one.experiment.rounds for one in found)
    length = f"{rounds} rounds" if not others else "rounds of its own number"
    (share, *_) = dict.fromkeys(one.experiment.validation for one in found)
    told = [
        f"Every method got {plan.trials} {'trials' if plan.trials > 1 else 'trial'}, "
        f"chosen by {KINDS[plan.search]} with seed {plan.seed}; a trial is "
        f"{length} with seed{'s' * (len(plan.trial_seeds) > 1)} {_listed(plan.trial_seeds)}.",
        f"A trial is judged by its score after the last round on {100 * share:g} % of each client's training examples, "
        "which it does not train on. No trial looks at the test set.",
        f"What was chosen then trained on all training examples with seeds {_listed(plan.seeds)}; the test set was "
        "looked at for those runs alone, and the score after the last round is told.",
    ]
    if again := [seed for seed in plan.seeds if seed in plan.trial_seeds]:
        told.append(f"Beware: seeds {_listed(again)} were those of trials, too, so that they are not fresh.")
    for one in found:
        points = size(one.space)
        if plan.search == "grid" and points > plan.trials:
            told.append(f"{one.name}'s grid has {points:g} points, of which {plan.trials} random ones were tried.")
        if lost := sum(trial.diverged for trial in one.trials):
            told.append(
                f"{one.name}: {lost} of its {len(one.trials)} trials diverged; they count as used, and as worst of all."
            )
    return told


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def chosen(found: Sequence[Tuned]) -> Grid:
    """What was chosen for each method, its score on validation and on the test set, and what it took."""
    name = " or ".join(dict.fromkeys(MEASURES[run.measure] for one in found for run in one.runs))
    heads = ["algorithm", "chosen", "validation", f"test {name}, last", "seeds", "trials", DIVERGED]
    rows = []
    for one in found:
        scores = [run.last for run in one.runs if run.scores and not run.diverged]
        lost = len(one.runs) - len(scores)
        test = spread(scores).percent() if scores else "none"
        test += f" ({lost} of {len(one.runs)} diverged)" if lost else ""
        lost_trials = sum(trial.diverged for trial in one.trials)
        counts = [str(len(one.runs)), str(len(one.trials)), str(lost_trials)]
        rows.append([one.name, settings(one.chosen.point), value(one.chosen), test, *counts])
    return Grid("", heads, rows)


def trials(one: Tuned) -> Grid:
    """Every trial of a method, in the order they were made."""
    keys = list(one.space)
    rows = [
        [
            str(trial.number),
            *(number(trial.point[key]) for key in keys),
            value(trial),
            str(trial.rounds),
            "chosen" if trial is one.chosen or trial == one.chosen else "",
        ]
        for trial in one.trials
    ]
    return Grid(one.name, ["trial", *keys, "validation", "rounds", ""], rows)


def markdown(plan: Plan, found: Sequence[Tuned]) -> str:
    """All of it in Markdown."""
    parts = ["# Methods tuned alike", " ".join(words(plan, found)), _table(chosen(found))]
    for one in found:
        offered = "; ".join(f"`{key}`: {what.words()}" for key, what in one.space.items())
        parts += [f"## Trials of {one.name}", f"Offered: {offered}.", _table(trials(one))]
    return "\n\n".join(parts) + "\n"


def _table(grid: Grid) -> str:
    lines = [grid.heads, ["---"] * len(grid.heads), *grid.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def settings(point: Point) -> str:
    """A point as people read it."""
    return ", ".join(f"{key} {number(one)}" for key, one in point.items())


def number(one: object) -> str:
    """A setting's value as people read it."""
    return f"{one:g}" if isinstance(one, float) else str(one)


def value(trial: Trial) -> str:
    """A trial's score in %."""
    return DIVERGED if trial.diverged else f"{100 * trial.value:.2f}"
