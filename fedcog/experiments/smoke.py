"""Every study as short as can be: to see that everything works."""

import dataclasses
from typing import Any

from fedcog.algorithms import Algorithm, Wrapper
from fedcog.experiments.study import WARM, Cell, Study


def tiny(study: Study) -> Study:
    """The same on the embedded digits, two or three rounds long."""
    words = (
        "A SMOKE RUN: two or three rounds on the embedded digits, whatever the headings say. It shows that things work."
    )
    title = f"{study.title} (smoke)"
    return study._replace(cells=tuple(map(_tiny, study.cells)), seeds=study.seeds[:2], words=words, title=title)


def _tiny(cell: Cell) -> Cell:
    full, warm = cell.experiment, cell.start.rounds if cell.start else WARM
    small = dataclasses.replace(
        full,
        algorithm=_small(full.algorithm, warm),
        dataset="digit-mosaics" if full.partition == "natural" else "digits",
        classes_per_client=2,
        clients=5,
        rounds=2 if cell.short else 3,
        local_steps=-(-full.local_steps // 200),
        batch_size=16,
        min_examples=1,
        mapping="vmap",
        threads=1,
        device="cpu",
    )
    start = cell.start and cell.start._replace(algorithm=_small(cell.start.algorithm, warm), rounds=1)
    return cell._replace(experiment=small, start=start, paper=None, paper_deviation=None)


def _small(algorithm: Algorithm, warm: int) -> Algorithm:
    """An algorithm that generates next to nothing, and FedCOG awake after one round instead of so many."""
    fewer: dict[str, Any] = {"steps": 100, "count": 16, "virtual": 50, "start_round": warm}
    known = {name: getattr(algorithm, name) for name in fewer if hasattr(algorithm, name)}
    changes: dict[str, Any] = {name: -(-value // fewer[name]) for name, value in known.items()}
    if isinstance(algorithm, Wrapper):
        changes["inner"] = _small(algorithm.inner, warm)
    return dataclasses.replace(algorithm, **changes)
