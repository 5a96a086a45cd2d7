"""The section that says how to have the runs again: every setting, the commands, the versions and the machine."""

from collections.abc import Sequence

from fedcog import settings
from fedcog.experiments.config import Experiment, layers
from fedcog.experiments.record import RunDirectory
from fedcog.experiments.report import readings
from fedcog.experiments.report.figures import look
from fedcog.experiments.report.markup import NONE, key, listed, table, text
from fedcog.experiments.run import Run
from fedcog.experiments.summary import Group


def choices(groups: Sequence[Group]) -> str:
    """Every setting: those in which the groups differ first, then the rest with their meaning."""
    meaning = {name: known.help for name, known in settings.settings(Experiment).items()}
    values: list[dict[str, str]] = []
    for each in groups:
        said: dict[str, dict[str, None]] = {}
        for run in each.runs:
            flat = {"algorithm": readings.name(run)}
            flat |= {name: getattr(run.experiment, name) for name in settings.settings(Experiment)}
            for layer, algorithm in layers(run.experiment.algorithm):
                own = settings.settings(type(algorithm))
                flat |= {f"{layer}.{name}": getattr(algorithm, name) for name in own}
                meaning |= {f"{layer}.{name}": known.help for name, known in own.items()}
            for name, value in flat.items():
                said.setdefault(name, {})[_value(value)] = None
        values.append({name: ", ".join(found) for name, found in said.items()})
    names = list(dict.fromkeys(name for found in values for name in found))
    differing = [name for name in names if len({found.get(name) for found in values}) > 1]
    content = ""
    if differing:
        head = "".join(
            f'<th scope="col" class="keyed">{key(*look(n))}{text(each.label)}</th>' for n, each in enumerate(groups)
        )
        rows = "".join(
            f'<tr class="differs"><th scope="row"><code>{text(name)}</code></th>'
            + "".join(f"<td>{text(found.get(name, NONE))}</td>" for found in values)
            + "</tr>"
            for name in differing
        )
        content += "<h3>Where the groups differ</h3>" + table("<th>setting</th>" + head, rows)
    rows = "".join(
        f'<tr><th scope="row"><code>{text(name)}</code></th><td>{text(values[0][name])}</td>'
        f"<td>{text(meaning.get(name, ''))}</td></tr>"
        for name in names
        if name not in differing
    )
    heading = "<h3>The same for all</h3>" if differing else ""
    return content + heading + table("<th>setting</th><th>value</th><th>meaning</th>", rows)


def making(runs: Sequence[Run]) -> str:
    """The commands that made the runs, when, on what and with which versions."""
    found = [RunDirectory(run.path).provenance() for run in runs]
    commands = dict.fromkeys(str(each["command"]) for each in found if "command" in each)
    days = sorted(str(each["started"]) for each in found if "started" in each)
    facts = {"started": " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))}
    for name in ("fedcog", "torch", "python", "device", "system"):
        facts[name] = listed(str(each[name]) for each in found if name in each)
    rows = "".join(f'<tr><th scope="row">{name}</th><td>{text(fact)}</td></tr>' for name, fact in facts.items() if fact)
    if not rows and not commands:
        return "<p>Nobody wrote down how these runs were made (provenance.json is missing).</p>"
    said = "".join(f"<p><code>{text(command)}</code></p>" for command in commands)
    return f"<h3>How they were made</h3>{said}{table('', rows)}"


def _value(value: object) -> str:
    return {"True": "true", "False": "false", "": '""'}.get(str(value), str(value))
