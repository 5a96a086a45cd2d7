"""Tests of the page about an audit, as text and in a real browser."""

import base64
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from PIL import Image

from fedcog.report.audit.page import page
from fedcog.studies.audit.attacks import InversionAttack
from fedcog.studies.audit.audit import Audit
from tests.support.browser import browser, console_messages, open_page, run_script, save_screenshot

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

__all__ = ["browser"]


def attack(target: str, num_inputs: int, channels: int = 1) -> InversionAttack:
    """Return the result of an attack, with pictures of one gray level each."""
    pictures = torch.stack(
        [
            torch.full((num_inputs, channels, 8, 8), 200, dtype=torch.uint8),
            torch.full((num_inputs, channels, 8, 8), 90, dtype=torch.uint8),
        ]
    )
    return InversionAttack(
        case="1 step, 8 examples",
        target=target,
        num_clients=1 if target == "client" else 4,
        num_steps=1,
        num_examples=num_inputs,
        num_inputs=num_inputs,
        psnr=21.53,
        best_psnr=30.25,
        baselines={"mean": 13.5, "noise": 6.0},
        cost=0.0125,
        label_recovery=1.0,
        label_chance=0.25,
        pictures=pictures,
        classes=tuple(f"class <{index}>" for index in range(num_inputs)),
    )


def audit(*attacks: InversionAttack, note: str = "") -> Audit:
    """Return an audit with these attacks."""
    return Audit(
        run=Path("x"),
        about={
            "algorithm": "fedavg",
            "dataset": "digits",
            "model": "small",
            "seed": 0,
            "round": 2,
            "rounds": 3,
            "clients": [0, 2],
        },
        settings={"client": 2, "steps": None, "iterations": 10, "seed": 1},
        membership={"note": "No <FedCOG>.", "members": 9, "others": 8, "model": {"auc": 0.625}},
        attacks=list(attacks),
        inversion_note=note,
        notes=["A note.", "It proves no privacy."],
        provenance={"command": "fedcog audit x", "commit": "abc"},
    )


def test_page_has_numbers_notes_settings_and_nothing_from_elsewhere() -> None:
    text = page(audit(attack("client", 1), attack("sum", 4)))
    for cell in ("21.5", "30.2", "13.5", "0.0125", "0.625", "4 of 4", "sum of 4"):
        assert f">{cell}<" in text, cell
    assert "It proves no privacy." in text and "fedcog audit x" in text and "abc" in text
    assert "No &lt;FedCOG&gt;." in text and "class &lt;3&gt;" in text
    assert "distance to members" not in text  # no generated inputs
    assert not re.search(r'(src|href)="(?!data:|#)', text)


def test_page_shows_originals_above_what_the_attack_finds() -> None:
    text = page(audit(attack("client", 2), attack("sum", 16, channels=3)))
    images = re.findall(r'alt="([^"]*)" src="data:image/png;base64,([^"]+)"', text)
    assert len(images) == 2 * (2 + 8)
    levels = {}
    for name, data in images[:4]:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            levels[name] = image.getpixel((0, 0))
    assert set(levels.values()) == {200, 90}
    assert levels["class &lt;0&gt;, original"] == 200 and levels["class &lt;0&gt;, attack"] == 90
    assert "the best 8 of 16 reconstructions" in text


def test_page_says_why_there_is_no_inversion_and_what_was_not_possible() -> None:
    text = page(audit(note="Inputs are tokens."))
    assert "Gradient inversion does not apply. Inputs are tokens." in text
    assert 'id="pictures"' not in text
    failed = InversionAttack("1 step, 1 example", "client", 1, problem="BatchNorm <cannot>.")
    text = page(audit(failed))
    assert "not possible" in text and "BatchNorm &lt;cannot&gt;." in text


@pytest.mark.browser
@pytest.mark.parametrize("width", ["phone", "desktop"])
def test_browser_shows_the_pictures(browser: "Chrome", tmp_path: Path, width: str) -> None:
    path = tmp_path / "audit.html"
    path.write_text(page(audit(attack("client", 1), attack("sum", 8))), encoding="utf-8")
    open_page(browser, path, width)
    save_screenshot(browser, f"audit-{width}")
    sizes = run_script(
        browser, "return [...document.images].map(i => [i.naturalWidth, i.width, i.complete])"
    )
    assert len(sizes) == 2 * (1 + 8)
    assert all(natural == 8 and shown > 8 and complete for natural, shown, complete in sizes)
    assert run_script(browser, "return document.documentElement.scrollWidth <= innerWidth")
    assert console_messages(browser) == []
