"""All settings and names of the command line as a JSON file, so that parsing needs no torch.

`python -m fedcog.cli.schema` writes the file again. A test checks that it is current.
"""

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedcog.core.settings import Setting

FILE = "schema.json"
RESULTS = Path(__file__).parents[2] / "results"
"""The stored results, which are in the repository and not in the package."""
TYPES = {"int": int, "float": float, "bool": bool, "str": str}


class Schema(NamedTuple):
    """What the command line knows without importing torch.

    Attributes:
        settings: The settings of an experiment.
        algorithms: The settings of every algorithm, by its name.
        datasets: Names of data sets.
        models: Names of networks.
        studies: Names of the paper's tables and figures.
        trackers: Names of trackers.
        searches: Names of hyperparameter searches.
        formats: Names of export formats.
        table_formats: Names of formats of tables.
        theory: Default settings of `fedcog theory`.
        validation: Fraction of the data that a sweep holds out by default.
        sizes: What a client sends, receives and keeps under every algorithm, as measured by
            `measure_sizes` in `studies/catalog.py`.
        gains: What every algorithm gains over FedAvg: setting, mean and half width, as
            `measured_gains` in `studies/paper/gains.py` reads it from the repository's results.
    """

    settings: dict[str, Setting]
    algorithms: dict[str, dict[str, Setting]]
    datasets: list[str]
    models: list[str]
    studies: list[str]
    trackers: list[str]
    searches: list[str]
    formats: list[str]
    table_formats: list[str]
    theory: dict[str, int]
    audit: dict[str, Any]
    validation: float
    sizes: dict[str, dict[str, Any]]
    gains: dict[str, list[list[Any]]]


@functools.cache
def load_schema() -> Schema:
    """Read the schema from the package."""
    content = json.loads((resources.files("fedcog.cli") / FILE).read_text())
    algorithms = {
        name: _from_json(settings) for name, settings in content.pop("algorithms").items()
    }
    return Schema(settings=_from_json(content.pop("settings")), algorithms=algorithms, **content)


def _from_json(settings: list[dict[str, Any]]) -> dict[str, Setting]:
    found = {}
    for one in settings:
        setting_type = one["type"]
        if isinstance(setting_type, list):
            setting_type = Literal[tuple(setting_type)]
        else:
            setting_type = TYPES[setting_type]
        bounds = tuple((sign, limit) for sign, limit in one["bounds"])
        found[one["name"]] = Setting(one["name"], setting_type, one["default"], one["help"], bounds)
    return found


def schema_text() -> str:
    """Build the content of the file from the package."""
    from typing import get_args

    from fedcog.algorithms import ALGORITHMS
    from fedcog.core.settings import settings
    from fedcog.data import DATASETS
    from fedcog.models.zoo import MODELS
    from fedcog.runs.config.experiment import Experiment
    from fedcog.runs.records.export import SUFFIXES
    from fedcog.runs.tracking import TRACKERS
    from fedcog.studies import paper
    from fedcog.studies.audit.audit import AuditSettings
    from fedcog.studies.catalog import measure_sizes
    from fedcog.studies.comparison_table import TableFormat
    from fedcog.studies.paper.gains import measured_gains
    from fedcog.studies.theory import TheoryPlan
    from fedcog.studies.tuning.search import Search
    from fedcog.studies.tuning.sweep import DEFAULT_VALIDATION

    plan = TheoryPlan()._asdict()
    audit = AuditSettings()
    content = {
        "settings": _to_json(settings(Experiment)),
        "algorithms": {name: _to_json(settings(cls)) for name, cls in ALGORITHMS.items()},
        "datasets": list(DATASETS),
        "models": list(MODELS),
        "studies": list(paper.studies()),
        "trackers": list(TRACKERS),
        "searches": list(get_args(Search)),
        "formats": list(SUFFIXES),
        "table_formats": list(get_args(TableFormat)),
        "theory": {name: plan[name] for name in ("clients", "rounds", "steps", "batch", "repeats")},
        "audit": {name: getattr(audit, name) for name in ("iterations", "tv", "labels", "seed")},
        "validation": DEFAULT_VALIDATION,
        "sizes": {name: sizes._asdict() for name, sizes in measure_sizes().items()},
        "gains": {
            name: [list(gain) for gain in gains] for name, gains in measured_gains(RESULTS).items()
        },
    }
    return json.dumps(content, indent=1) + "\n"


def _to_json(settings: dict[str, Setting]) -> list[dict[str, Any]]:
    return [
        {
            "name": setting.name,
            "type": list(setting.choices) if setting.choices else setting.type.__name__,
            "default": setting.default,
            "help": setting.help,
            "bounds": [list(bound) for bound in setting.bounds],
        }
        for setting in settings.values()
    ]


if __name__ == "__main__":
    (Path(__file__).parent / FILE).write_text(schema_text())
