"""Lines of results that are none, whatever they hold."""

from typing import Any

import pytest

from fedcog.studies.probes import ProbeKind
from fedcog.studies.result_checks import PRIVACY_KEYS, check_result

TRAINED: dict[str, Any] = {
    "accuracy": [0.5, None],
    "loss": [1.5, 2],
    "clients": [{"client": 0, "gap": 0.5}],
}
VIEW = dict.fromkeys(PRIVACY_KEYS, 0.5)
FOUND: dict[ProbeKind, dict[str, Any]] = {
    "client-time": {"seconds": [1.5, 2.5], "round": [0.5, 1]},
    "generation-time": {"seconds": [0.5]},
    "partition": {"classes": ["a", "b"], "counts": [[1, 2], [3, 0]]},
    "pictures": {"classes": ["a"], "rows": {"step 0": "x"}},
    "privacy": {"pixels": VIEW, "features": VIEW, "model": {"auc": 0.5}},
}


def line(**more: Any) -> dict[str, Any]:
    return {"seed": 0, "provenance": {}, **more}


def test_what_is_right_passes() -> None:
    check_result(line(**TRAINED), None)
    for kind, found in FOUND.items():
        check_result(line(found=found), kind)


@pytest.mark.parametrize(
    "changed",
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
def test_what_is_no_run_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no"):
        check_result(line(**TRAINED) | changed, None)


@pytest.mark.parametrize(
    ("kind", "changed"),
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
        ("privacy", {"pixels": VIEW | {"auc": "high"}}),
        ("privacy", {"model": {"auc": None}}),
    ],
)
def test_what_no_probe_found_is_refused(kind: ProbeKind, changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no"):
        check_result(line(found=FOUND[kind] | changed), kind)


@pytest.mark.parametrize("kind", FOUND)
def test_what_is_missing_is_named(kind: ProbeKind) -> None:
    for name in FOUND[kind]:
        with pytest.raises(KeyError, match=name):
            check_result(
                line(found={key: value for key, value in FOUND[kind].items() if key != name}), kind
            )
    with pytest.raises(KeyError, match="found"):
        check_result(line(**TRAINED), kind)
