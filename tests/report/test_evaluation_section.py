"""The report's section about the clients' own test examples, and the table of further metrics."""

import re
from pathlib import Path

import pytest

import fedcog
from fedcog import Ditto, Experiment, FedAvg, FedProx
from fedcog.report import evaluation_section
from fedcog.runs.records.run_directory import RunDirectory

SHAPE = {"clients": 3, "rounds": 2, "local_steps": 2, "batch_size": 8, "threads": 1}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[fedcog.Group]:
    experiments = [
        Experiment(algorithm, local_test=0.2, metrics="ece,balanced_accuracy", **SHAPE)  # type: ignore[arg-type]
        for algorithm in (FedAvg(), FedProx(), Ditto())
    ]
    folder = tmp_path_factory.mktemp("tests") / "runs"
    return fedcog.group(fedcog.compare(experiments, seeds=[0, 1], out=folder))


def test_curves_of_global_and_personal_models_have_different_styles(
    groups: list[fedcog.Group],
) -> None:
    curves = [
        *evaluation_section._client_test_curves(groups, ""),
        *evaluation_section._client_test_curves(groups, "personal_"),
    ]
    assert len(curves) == 4
    page = evaluation_section.client_tests(groups)
    colors = re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.7", page)
    assert len(set(colors)) == len(curves)


def test_further_metrics_are_methods_by_metric(groups: list[fedcog.Group]) -> None:
    content = evaluation_section.metrics_table(groups)
    heads = re.findall(r'<th class="number" scope="col">(.*?)</th>', content)
    assert heads == ["", "balanced_accuracy", "ece"]
    rows = re.findall(r"<tr>(.*?)</tr>", content)[-len(groups) :]
    assert len(rows) == len(groups)
    for row, each in zip(rows, groups, strict=True):
        assert row.count("<td") == 2
        values = [run.lines[-1]["metrics"]["ece"] for run in each.runs]
        assert f"{sum(values) / len(values):.4f} ±" in row


def test_headings_of_tables_are_escaped(groups: list[fedcog.Group]) -> None:
    hostile = [each._replace(label="<script>") for each in groups]
    page = evaluation_section.client_tests(hostile)
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_names_of_clients_are_empty_where_nothing_is_recorded(tmp_path: Path) -> None:
    run = fedcog.run(Experiment(**SHAPE), tmp_path / "run")  # type: ignore[arg-type]
    assert run.client_names == []
    (run.path / "federation.safetensors").unlink()
    assert RunDirectory(run.path).client_names(3) == []
