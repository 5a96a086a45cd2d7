"""The ledger: FedCOG sends what FedAvg sends, SCAFFOLD twice that."""

import re
from pathlib import Path

import pytest

import fedcog
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment

SMALL = {
    "rounds": 2,
    "clients": 3,
    "local_steps": 1,
    "batch_size": 8,
    "mapping": "loop",
    "workers": 1,
    "device": "cpu",
}


def test_what_each_method_sends_beside_fedavg(tmp_path: Path) -> None:
    tables = {"fedcog": {"start_round": 0, "count": 4, "steps": 1}}
    names = ["fedavg", "fedcog", "scaffold", "scaffold+fedcog", "fedgen"]
    settings = [Experiment(algorithm=make_algorithm(name, tables), **SMALL) for name in names]  # type: ignore[arg-type]
    runs = fedcog.compare(settings, [0], tmp_path / "all")
    sent = {
        name: (run.lines[-1]["local"][0]["up"], run.lines[-1]["local"][0]["down"])
        for name, run in zip(names, runs, strict=True)
    }
    assert sent["fedcog"] == sent["fedavg"]
    assert sent["scaffold"] == sent["scaffold+fedcog"]
    assert sent["scaffold"][0] / sent["fedavg"][0] == pytest.approx(2, abs=0.01)
    assert sent["scaffold"][1] == 2 * sent["fedavg"][1]
    assert sent["fedavg"][0] < sent["fedgen"][0] < 2 * sent["fedavg"][0]
    page = (tmp_path / "all" / "report.html").read_text()
    section = page.partition('id="traffic"')[2].partition("</section>")[0]
    assert re.findall(r"([\d.]+) x<", section)[:4] == ["1.00", "1.00", "2.00", "2.00"]
    assert f"{sent['fedavg'][0]:,}" in section
