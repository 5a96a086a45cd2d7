"""The section of a report that makes runs reproducible: settings, commands, versions, machine."""

from collections.abc import Sequence

from fedcog.core import settings
from fedcog.report import run_values
from fedcog.report.figures import line_style
from fedcog.report.markup import NO_VALUE, join_words, line_sample, table, text
from fedcog.report.run_values import FederationRecord
from fedcog.runs.config.composition import named_layers
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import OBJECT_NAMES, RunDirectory
from fedcog.runs.records.summary import Group


def settings_section(groups: Sequence[Group]) -> str:
    """Show every setting: those in which groups differ first, then the others."""
    values = [_settings_of(group) for group in groups]
    names = list(dict.fromkeys(name for settings_ in values for name in settings_))
    differing = [name for name in names if len({settings_.get(name) for settings_ in values}) > 1]
    content = ""
    if differing:
        content += _differing_table(groups, values, differing)
        content += "<h3>The same for all</h3>"
    meanings = _meanings(groups)
    rows = "".join(
        f'<tr><th scope="row"><code>{text(name)}</code></th><td>{text(values[0][name])}</td>'
        f"<td>{text(meanings.get(name, ''))}</td></tr>"
        for name in names
        if name not in differing
    )
    return content + table("<th>setting</th><th>value</th><th>meaning</th>", rows)


def _settings_of(group: Group) -> dict[str, str]:
    """The value of each setting; several if the runs of a group differ, as in their seeds."""
    texts: dict[str, dict[str, None]] = {}
    for run in group.runs:
        values: dict[str, object] = {"algorithm": run_values.algorithm_of(run)}
        for name in settings.settings(Experiment):
            values[name] = getattr(run.experiment, name)
        for layer, algorithm in named_layers(run.experiment.algorithm):
            for name in settings.settings(type(algorithm)):
                values[f"{layer}.{name}"] = getattr(algorithm, name)
        for name, value in values.items():
            texts.setdefault(name, {})[_value_text(value)] = None
    return {name: ", ".join(values) for name, values in texts.items()}


def _meanings(groups: Sequence[Group]) -> dict[str, str]:
    """The help text of each setting."""
    meanings = {name: setting.help for name, setting in settings.settings(Experiment).items()}
    for group in groups:
        for run in group.runs:
            for layer, algorithm in named_layers(run.experiment.algorithm):
                for name, setting in settings.settings(type(algorithm)).items():
                    meanings[f"{layer}.{name}"] = setting.help
    return meanings


def _differing_table(
    groups: Sequence[Group], values: Sequence[dict[str, str]], differing: Sequence[str]
) -> str:
    head = "".join(
        f'<th scope="col" class="keyed">{line_sample(*line_style(index))}{text(group.label)}</th>'
        for index, group in enumerate(groups)
    )
    rows = ""
    for name in differing:
        cells = "".join(f"<td>{text(settings_.get(name, NO_VALUE))}</td>" for settings_ in values)
        rows += f'<tr class="differs"><th scope="row"><code>{text(name)}</code></th>{cells}</tr>'
    return "<h3>Where the groups differ</h3>" + table("<th>setting</th>" + head, rows)


WEIGHTS_SOURCES = {
    "given": "those of the network that was passed in, which no seed gives again",
    "function": "the same for every seed, as the function that builds the network makes them",
}
"""What a report says of initial weights that do not come from the seed."""


def provenance_section(runs: Sequence[Run], federations: Sequence[FederationRecord]) -> str:
    """Show what made the runs: commands, the user's own objects, time, machine and versions.

    Args:
        runs: The runs.
        federations: What `run_values.federation` returns for each.

    Returns:
        HTML.
    """
    records = [RunDirectory(run.path).provenance() for run in runs]
    commands = dict.fromkeys(str(record["command"]) for record in records if "command" in record)
    starts = sorted(str(record["started"]) for record in records if "started" in record)
    facts = _own_objects(runs, federations)
    facts["started"] = " to ".join(dict.fromkeys([*starts[:1], *starts[-1:]]))
    for name in ("fedcog", "torch", "python", "device", "system"):
        facts[name] = join_words(str(record[name]) for record in records if name in record)
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{text(fact)}</td></tr>'
        for name, fact in facts.items()
        if fact
    )
    if not rows and not commands:
        return "<p>The runs do not record how they were made (provenance.json is missing).</p>"
    lines = "".join(f"<p><code>{text(command)}</code></p>" for command in commands)
    return f"<h3>How they were made</h3>{lines}{table('', rows)}"


def _own_objects(runs: Sequence[Run], federations: Sequence[FederationRecord]) -> dict[str, str]:
    """Name what settings do not describe: the user's objects, given weights, adapted inputs."""
    facts = {
        f"own {role}": join_words(names)
        for role in OBJECT_NAMES
        if (names := [run.user_objects[role] for run in runs if role in run.user_objects])
    }
    infos = [info for _, info in federations]
    sources = [str(info.get("initial_weights")) for info in infos]
    facts["initial weights"] = join_words(
        WEIGHTS_SOURCES[source] for source in sources if source in WEIGHTS_SOURCES
    )
    facts["inputs"] = join_words(info["input_note"] for info in infos if "input_note" in info)
    return facts


def _value_text(value: object) -> str:
    return {"True": "true", "False": "false", "": '""'}.get(str(value), str(value))
