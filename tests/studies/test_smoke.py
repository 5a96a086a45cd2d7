"""Smoke test of the whole paper: tiny versions fill every table and draw every figure."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from fedcog.cli.main import main
from fedcog.studies import job_planning, paper, smoke
from fedcog.studies.result_store import Results

pytestmark = pytest.mark.slow


def test_every_study_fills_its_tables_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["reproduce", "all", "--smoke", "--plain", "--results", str(tmp_path)]
    arguments += ["--seeds", "0"]  # one of the two default seeds
    assert main(arguments) == 0, capsys.readouterr().err[-2000:]
    studies = [
        smoke.smoke_version(study)._replace(seeds=(0,)) for study in paper.studies().values()
    ]
    for study, progress in zip(
        studies, job_planning.progress_of(studies, Results(tmp_path)), strict=True
    ):
        assert progress.num_done == progress.num_jobs > 0, study.name
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    sections = dict(
        zip(*[iter(re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    assert list(sections) == [study.title for study in studies]
    for study in studies:
        assert "not run" not in sections[study.title], study.name
        assert (
            "SMOKE RUN" in sections[study.title]
            and "by `fedcog reproduce all --smoke`" in sections[study.title]
        )
    figures = re.findall(r"\((figures/.*?)\.svg\)", text)
    assert len(figures) == len({*figures}) >= 15
    for name in figures:
        assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
        with Image.open(tmp_path / f"{name}.png") as image:
            assert min(image.size) > 200
    latex = (tmp_path / "results.tex").read_text(encoding="utf-8")
    assert (
        latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == text.count("| --- |\n")
    )
    capsys.readouterr()
    assert main([*arguments, "--status"]) == 0
    assert not re.search(r" 0/[1-9]", capsys.readouterr().out)
