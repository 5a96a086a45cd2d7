"""Every study as short as can be: to see that everything works."""

import dataclasses
from typing import Any

from fedcog.algorithms import Algorithm, Wrapper
from fedcog.experiments.config import Experiment
from fedcog.experiments.study import WARM, Cell, Start, Study


def tiny(study: Study) -> Study:
    """The same on the embedded digits, two or three rounds long."""
    cells = tuple(cell if cell.experiment is None else _tiny(cell, cell.experiment) for cell in study.cells)
    words = (
        "A SMOKE RUN: two or three rounds on the embedded digits, whatever the headings say. It shows that things work."
    )
    return study._replace(cells=cells, seeds=study.seeds[:2], words=words, title=f"{study.title} (smoke)")


def _tiny(cell: Cell, full: Experiment) -> Cell:
    small = dataclasses.replace(
        full,
        algorithm=_small(full.algorithm),
        dataset="digits",
        classes_per_client=2,
        clients=5,
        rounds=2 if full.rounds <= WARM + 1 else 3,
        local_steps=-(-full.local_steps // 200),
        batch_size=16,
        min_examples=1,
        mapping="vmap",
        threads=1,
        device="cpu",
    )
    start = cell.start and Start(_small(cell.start.algorithm), 1)
    return cell._replace(experiment=small, start=start, paper=None, paper_deviation=None)


def _small(algorithm: Algorithm) -> Algorithm:
    """An algorithm that generates next to nothing, and FedCOG awake after one round instead of fifty."""
    fewer: dict[str, Any] = {"steps": 100, "count": 16, "virtual": 50, "start_round": WARM}
    known = {name: getattr(algorithm, name) for name in fewer if hasattr(algorithm, name)}
    changes: dict[str, Any] = {name: -(-value // fewer[name]) for name, value in known.items()}
    if isinstance(algorithm, Wrapper):
        changes["inner"] = _small(algorithm.inner)
    return dataclasses.replace(algorithm, **changes)
