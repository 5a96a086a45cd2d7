"""Text of a sweep: its budget in sentences, and tables of the chosen settings and all trials."""

from collections.abc import Sequence

from fedcog.core.tasks import METRIC_LABELS
from fedcog.runs.records.summary import spread
from fedcog.studies.tables import Table, markdown_table
from fedcog.studies.tuning.search_space import Point, size
from fedcog.studies.tuning.sweep import SweepPlan, Trial, Tuned

SEARCH_NAMES = {"grid": "a grid", "random": "random search", "optuna": "Optuna's TPE"}
DIVERGED = "diverged"


def summary_sentences(plan: SweepPlan, tuned: Sequence[Tuned]) -> list[str]:
    """Describe the budget, the selection, and what to know about the results.

    Args:
        plan: The plan of the sweep.
        tuned: The tuned algorithms.

    Returns:
        Whole sentences.
    """
    return [*_budget_sentences(plan, tuned), *_warning_sentences(plan, tuned)]


def _budget_sentences(plan: SweepPlan, tuned: Sequence[Tuned]) -> list[str]:
    rounds = list(dict.fromkeys(one.experiment.rounds for one in tuned))
    length = f"{rounds[0]} rounds" if len(rounds) == 1 else "the algorithm's number of rounds"
    trials = "1 trial" if plan.trials == 1 else f"{plan.trials} trials"
    trial_seeds = _seeds_text(plan.trial_seeds)
    share = 100 * tuned[0].experiment.validation
    return [
        f"Every method got {trials}, chosen by {SEARCH_NAMES[plan.search]} with seed {plan.seed}; "
        f"a trial is {length} with {trial_seeds}.",
        f"The score of a trial is taken after the last round on {share:g} % of each client's "
        "training examples, which the trial does not train on. No trial looks at the test set.",
        "The chosen settings then trained without validation examples with "
        f"{_seeds_text(plan.seeds)}; only these runs use the test set, and their score is taken "
        "after the last round.",
    ]


def _warning_sentences(plan: SweepPlan, tuned: Sequence[Tuned]) -> list[str]:
    sentences = []
    reused = [seed for seed in plan.seeds if seed in plan.trial_seeds]
    if reused:
        sentences.append(
            f"Warning: trials used {_seeds_text(reused)} too, so the final runs are not "
            "independent of the selection."
        )
    for one in tuned:
        sentences += one.edges
        num_points = size(one.space)
        if plan.search == "grid" and num_points > plan.trials:
            sentences.append(
                f"The grid of {one.name} has {num_points:g} points, of which {plan.trials} random "
                "ones were tried."
            )
        num_diverged = sum(trial.diverged for trial in one.trials)
        if num_diverged:
            sentences.append(
                f"{one.name}: {num_diverged} of its {len(one.trials)} trials diverged; a diverged "
                "trial counts against the budget and ranks last."
            )
    return sentences


def _seeds_text(seeds: Sequence[int]) -> str:
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{noun} {', '.join(str(seed) for seed in seeds)}"


def chosen_table(tuned: Sequence[Tuned]) -> Table:
    """Tabulate the chosen settings of each algorithm, with validation and test scores."""
    metrics = dict.fromkeys(METRIC_LABELS[run.metric] for one in tuned for run in one.runs)
    test_header = f"test {' or '.join(metrics)}, last"
    header = ["algorithm", "chosen", "validation", test_header, "seeds", "trials", DIVERGED]
    rows = []
    for one in tuned:
        scores = [run.last for run in one.runs if run.scores and not run.diverged]
        test = spread(scores).percent() if scores else "none"
        num_diverged = len(one.runs) - len(scores)
        if num_diverged:
            test += f" ({num_diverged} of {len(one.runs)} diverged)"
        rows.append(
            [
                one.name,
                point_text(one.chosen.point),
                score_text(one.chosen),
                test,
                str(len(one.runs)),
                str(len(one.trials)),
                str(sum(trial.diverged for trial in one.trials)),
            ]
        )
    return Table("", header, rows)


def trials_table(tuned: Tuned) -> Table:
    """Tabulate all trials of an algorithm in order."""
    names = list(tuned.space)
    rows = []
    for trial in tuned.trials:
        values = [value_text(trial.point[name]) for name in names]
        mark = "chosen" if trial == tuned.chosen else ""
        rows.append([str(trial.number), *values, score_text(trial), str(trial.rounds), mark])
    return Table(tuned.name, ["trial", *names, "validation", "rounds", ""], rows)


def markdown(plan: SweepPlan, tuned: Sequence[Tuned]) -> str:
    """Format a sweep in Markdown.

    Args:
        plan: The plan of the sweep.
        tuned: The tuned algorithms.

    Returns:
        The text of sweep.md.
    """
    parts = [
        "# Methods tuned with equal budgets",
        " ".join(summary_sentences(plan, tuned)),
        markdown_table(chosen_table(tuned)),
    ]
    for one in tuned:
        domains = "; ".join(f"`{name}`: {domain.text()}" for name, domain in one.space.items())
        parts += [
            f"## Trials of {one.name}",
            f"Search space: {domains}.",
            markdown_table(trials_table(one)),
        ]
    return "\n\n".join(parts) + "\n"


def point_text(point: Point) -> str:
    """Format a point for people."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in point.items())


def value_text(value: object) -> str:
    """Format the value of a setting for people."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def score_text(trial: Trial) -> str:
    """Format the score of a trial, in percent."""
    return DIVERGED if trial.diverged else f"{100 * trial.score:.2f}"
