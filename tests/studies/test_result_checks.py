"""Tests of the checks that reject malformed result lines."""

from typing import Any

import pytest

from fedcog.studies.probes import ProbeKind
from fedcog.studies.result_checks import PRIVACY_KEYS, check_result

RUN_RESULT: dict[str, Any] = {
    "accuracy": [0.5, None],
    "loss": [1.5, 2],
    "clients": [{"client": 0, "gap": 0.5}],
}
PRIVACY_SCORES = dict.fromkeys(PRIVACY_KEYS, 0.5)
FINDINGS: dict[ProbeKind, dict[str, Any]] = {
    "client-time": {"seconds": [1.5, 2.5], "round": [0.5, 1]},
    "generation-time": {"seconds": [0.5]},
    "partition": {"classes": ["a", "b"], "counts": [[1, 2], [3, 0]]},
    "pictures": {"classes": ["a"], "rows": {"step 0": "x"}},
    "privacy": {"pixels": PRIVACY_SCORES, "features": PRIVACY_SCORES, "model": {"auc": 0.5}},
}


def result_line(**more: Any) -> dict[str, Any]:
    return {"seed": 0, "provenance": {}, **more}


def test_valid_results_pass() -> None:
    check_result(result_line(**RUN_RESULT), None)
    for kind, findings in FINDINGS.items():
        check_result(result_line(found=findings), kind)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": "0"},
        {"seed": True},
        {"provenance": []},
        {"accuracy": 0.5},
        {"accuracy": [1.5]},
        {"accuracy": [float("nan")]},
        {"accuracy": [True]},
        {"c_p": [1.5]},
        {"o_f1": "0.5"},
        {"loss": ["1"]},
        {"loss": [1e301]},
        {"clients": [0]},
        {"clients": [{"gap": 0.5}]},
        {"clients": [{"client": 0, "gap": "x"}]},
    ],
)
def test_malformed_run_result_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no"):
        check_result(result_line(**RUN_RESULT) | changes, None)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("client-time", {"seconds": ["1"]}),
        ("client-time", {"round": None}),
        ("generation-time", {"seconds": {}}),
        ("generation-time", {"seconds": [float("inf")]}),
        ("partition", {"counts": []}),
        ("partition", {"counts": [[1, 2], [3]]}),
        ("partition", {"counts": [[1, "2"]]}),
        ("partition", {"counts": 3}),
        ("partition", {"classes": [1, 2]}),
        ("pictures", {"classes": "a"}),
        ("pictures", {"rows": {"step 0": 5}}),
        ("privacy", {"pixels": PRIVACY_SCORES | {"auc": "high"}}),
        ("privacy", {"model": {"auc": None}}),
    ],
)
def test_malformed_probe_result_is_refused(kind: ProbeKind, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no"):
        check_result(result_line(found=FINDINGS[kind] | changes), kind)


@pytest.mark.parametrize("kind", FINDINGS)
def test_error_names_the_missing_key(kind: ProbeKind) -> None:
    for name in FINDINGS[kind]:
        with pytest.raises(KeyError, match=name):
            check_result(
                result_line(
                    found={key: value for key, value in FINDINGS[kind].items() if key != name}
                ),
                kind,
            )
    with pytest.raises(KeyError, match="found"):
        check_result(result_line(**RUN_RESULT), kind)
