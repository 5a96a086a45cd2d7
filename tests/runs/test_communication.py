"""Tests of recorded traffic: FedCOG sends as much as FedAvg, SCAFFOLD twice as much."""

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


@pytest.mark.slow
def test_traffic_of_each_algorithm_relative_to_fedavg(tmp_path: Path) -> None:
    tables = {"fedcog": {"start_round": 0, "count": 4, "steps": 1}}
    names = ["fedavg", "fedcog", "scaffold", "scaffold+fedcog", "fedgen"]
    experiments = [
        Experiment(algorithm=make_algorithm(name, tables), **SMALL)  # type: ignore[arg-type]
        for name in names
    ]
    runs = fedcog.compare(experiments, [0], tmp_path / "all")
    traffic = {
        name: (run.lines[-1]["local"][0]["up"], run.lines[-1]["local"][0]["down"])
        for name, run in zip(names, runs, strict=True)
    }
    assert traffic["fedcog"] == traffic["fedavg"]
    assert traffic["scaffold"] == traffic["scaffold+fedcog"]
    assert traffic["scaffold"][0] / traffic["fedavg"][0] == pytest.approx(2, abs=0.01)
    assert traffic["scaffold"][1] == 2 * traffic["fedavg"][1]
    assert traffic["fedavg"][0] < traffic["fedgen"][0] < 2 * traffic["fedavg"][0]
    page = (tmp_path / "all" / "report.html").read_text()
    section = page.partition('id="traffic"')[2].partition("</section>")[0]
    assert re.findall(r"([\d.]+) x<", section)[:4] == ["1.00", "1.00", "2.00", "2.00"]
    assert f"{traffic['fedavg'][0]:,}" in section
