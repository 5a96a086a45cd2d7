"""The tables of an audit, for its page and for the terminal."""

import math
from collections.abc import Sequence

from fedcog.report.markup import NO_VALUE
from fedcog.studies.audit.attacks import InversionAttack
from fedcog.studies.audit.audit import Audit

ATTACK_COLUMNS = (
    "audited client",
    "attacked",
    "inputs",
    "PSNR (dB)",
    "best",
    "baseline",
    "cosine cost",
    "labels (%)",
    "by chance",
)
ATTACK_NOTE = (
    "PSNR: mean over reconstructed inputs, each assigned to an original of its own; best: the best "
    "pair; higher is closer. Baseline: the best of three guesses that ignore the update (the mean "
    "training input, noise, test inputs), assigned in the same way. Cosine cost: 1 - cos of "
    "simulated and observed update; 0 means that they are parallel. Labels: the attacker's that "
    "are right, and those of random guesses."
)
MEMBERSHIP_COLUMNS = (
    "view",
    "AUC",
    "distance to members",
    "distance to others",
    "nearer to members (%)",
    "by chance (%)",
)
MEMBERSHIP_NOTE = (
    "Members are training examples; others are test examples of the same classes. AUC: how "
    "well an example's loss (model), or its distance to the nearest generated input (pixels, "
    "features), tells members from others; 0.5 means not at all. Distances are those of generated "
    "inputs to the nearest example of their class. By chance: the nearest one is in the first of "
    "two halves of the others."
)


def attack_rows(audit: Audit) -> list[tuple[str, ...]]:
    """Return a row of `ATTACK_COLUMNS` for each attack.

    Args:
        audit: The audit.

    Returns:
        Rows of text.
    """
    return [_attack_row(attack) for attack in audit.attacks]


def _attack_row(attack: InversionAttack) -> tuple[str, ...]:
    target = "one client"
    if attack.target == "sum":
        target = f"sum of {attack.num_clients}"
    if attack.problem:
        return (attack.case, target, "not possible", *[NO_VALUE] * 6)
    psnr = _number(attack.psnr)
    if attack.is_closed_form:
        psnr += " (exact)"
    return (
        attack.case,
        target,
        f"{attack.num_inputs} of {attack.num_examples}",
        psnr,
        _number(attack.best_psnr),
        _number(attack.baseline),
        _number(attack.cost, 4),
        _percent(attack.label_recovery),
        _percent(attack.label_chance),
    )


def membership_rows(audit: Audit) -> list[tuple[str, ...]]:
    """Return a row of `MEMBERSHIP_COLUMNS` for the model and each view of generated inputs.

    Args:
        audit: The audit.

    Returns:
        Rows of text; none if membership inference does not apply.
    """
    rows: list[tuple[str, ...]] = []
    for view in ("model", "pixels", "features"):
        found = audit.membership.get(view)
        if found is None:
            continue
        rows.append(
            (
                view,
                _number(found["auc"], 3),
                _number(found.get("to_members"), 3),
                _number(found.get("to_others"), 3),
                _percent(found.get("nearer_to_members")),
                _percent(found.get("nearer_by_chance")),
            )
        )
    return rows


def used_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the columns in which some row has a value.

    Args:
        columns: Names of the columns.
        rows: Cells by row.

    Returns:
        Their numbers.
    """
    return [index for index in range(len(columns)) if any(row[index] != NO_VALUE for row in rows)]


def _number(value: float | None, digits: int = 1) -> str:
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NO_VALUE if value is None else f"{100 * value:.0f}"
