"""Smoke versions of studies: as short as possible, to check that everything works."""

import dataclasses

from fedcog.algorithms import Algorithm
from fedcog.core.integers import ceil_div
from fedcog.studies.study import WARM_START_ROUNDS, Cell, Study


def smoke_version(study: Study) -> Study:
    """Return the study on the embedded digits, with runs of two or three rounds."""
    return study._replace(
        title=f"{study.title} (smoke)",
        description=(
            "A SMOKE RUN: two or three rounds on the embedded digits, whatever the headings say. "
            "It shows that things work."
        ),
        cells=tuple(_smoke_cell(cell) for cell in study.cells),
        seeds=study.seeds[:2],
    )


def _smoke_cell(cell: Cell) -> Cell:
    full = cell.experiment
    start_rounds = cell.warm_start.rounds if cell.warm_start else WARM_START_ROUNDS
    experiment = dataclasses.replace(
        full,
        algorithm=_smoke_algorithm(full.algorithm, start_rounds),
        dataset="digit-mosaics" if full.partition == "natural" else "digits",
        classes_per_client=2,
        clients=full.clients if full.devices else 5,
        rounds=2 if cell.is_short else 3,
        local_steps=ceil_div(full.local_steps, 200),
        batch_size=16,
        min_examples=1,
        mapping="vmap",
        threads=1,
        device="cpu",
    )
    warm_start = None
    if cell.warm_start is not None:
        algorithm = _smoke_algorithm(cell.warm_start.algorithm, start_rounds)
        warm_start = cell.warm_start._replace(algorithm=algorithm, rounds=1)
    return cell._replace(experiment=experiment, warm_start=warm_start, paper=None, paper_std=None)


def _smoke_algorithm(algorithm: Algorithm, start_rounds: int) -> Algorithm:
    """Generate very little, and let FedCOG begin after one round in place of `start_rounds`."""
    divisors = {"steps": 100, "count": 16, "virtual": 50, "start_round": start_rounds}

    def shrink(layer: Algorithm) -> Algorithm:
        changes = {
            name: ceil_div(getattr(layer, name), divisor)
            for name, divisor in divisors.items()
            if hasattr(layer, name)
        }
        return dataclasses.replace(layer, **changes)

    return algorithm.map_layers(shrink)
