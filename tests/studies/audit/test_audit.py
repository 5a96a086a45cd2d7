"""Tests of audits of recorded runs: what is observed, what is measured, what is refused."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedcog
from fedcog import Algorithm, ConfigError, Experiment, FedCOG, FedRep, RecordError
from fedcog.core import tree
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.studies.audit.audit import AuditSettings, audit_run
from fedcog.studies.audit.inversion import Knowledge, cosine_cost, simulated_gradient
from fedcog.studies.audit.observation import (
    AuditCase,
    AuditedRun,
    observe,
    open_run,
    refusal,
    value_range,
)

SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "local_steps": 3, "batch_size": 8, "lr": 0.1}
SMALL |= {"threads": 1, "workers": 1, "evaluate_local": False, "partition": "iid"}
FAST = AuditSettings(iterations=3)


def recorded(out: Path, algorithm: Algorithm | None = None, **changes: Any) -> Path:
    """Carry a small run out and return its directory."""
    objects = {}
    if "data" in changes:
        objects["data"] = changes.pop("data")
    if "network" in changes:
        objects["model"] = changes.pop("network")
    experiment = Experiment(algorithm or Algorithm(), **SMALL | changes)
    fedcog.run(experiment, out, report=False, **objects)
    return out


@pytest.fixture(scope="module")
def fedavg_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("runs") / "fedavg")


def truth_cost(
    audited: AuditedRun, case: AuditCase, client_ids: list[int], is_sum: bool = False
) -> float:
    """Return the cosine cost of the examples that clients trained on: 0 if the attacker is right.

    It depends on the model of the update only, not on the optimization.
    """
    seen = observe(audited, case, client_ids, is_sum=is_sum)
    model = audited.prepared.model
    zero = torch.zeros(())
    attacker = Knowledge(model, seen.params, seen.buffers, False, {}, zero, zero, True)
    x = seen.originals.inputs(slice(None))
    y = torch.nn.functional.one_hot(seen.originals.labels, model.num_classes).to(x)
    return float(cosine_cost(simulated_gradient(attacker, x, y), seen.gradient))


@pytest.mark.parametrize("case", [AuditCase(1, 1), AuditCase(1, 8)])
def test_one_step_is_the_gradient_of_its_examples(fedavg_run: Path, case: AuditCase) -> None:
    audited = open_run(fedavg_run, UserObjects())
    assert truth_cost(audited, case, [audited.client]) < 1e-5


def test_one_step_gradient_has_the_right_scale(fedavg_run: Path) -> None:
    audited = open_run(fedavg_run, UserObjects())
    seen = observe(audited, AuditCase(1, 2), [1])
    zero = torch.zeros(())
    model = audited.prepared.model
    attacker = Knowledge(model, seen.params, seen.buffers, False, {}, zero, zero, True)
    x = seen.originals.inputs(slice(None))
    y = torch.nn.functional.one_hot(seen.originals.labels, model.num_classes).to(x)
    for name, value in simulated_gradient(attacker, x, y).items():
        torch.testing.assert_close(value, seen.gradient[name], rtol=1e-3, atol=1e-4)


def test_sum_is_the_gradient_of_all_clients_examples(fedavg_run: Path) -> None:
    audited = open_run(fedavg_run, UserObjects())
    assert truth_cost(audited, AuditCase(1, 4), audited.request.client_ids) < 1e-3


def test_precision_float64_is_exact(tmp_path: Path) -> None:
    audited = open_run(recorded(tmp_path / "run", precision="float64"), UserObjects())
    assert abs(truth_cost(audited, AuditCase(1, 1), [0])) < 1e-12


def test_own_steps_are_those_of_the_next_round(fedavg_run: Path, tmp_path: Path) -> None:
    """The observed change of the parameters is the one that a continued run applies."""
    audited = open_run(fedavg_run, UserObjects())
    seen = observe(audited, AuditCase(), audited.request.client_ids)
    assert (seen.num_steps, seen.num_examples) == (3, 4 * 3 * 8)
    longer = recorded(tmp_path / "longer", rounds=3)
    before = RunDirectory(fedavg_run).load()
    after = RunDirectory(longer).load()
    assert before is not None and after is not None
    step_size = float(
        audited.prepared.simulator.cohort.optimizer.effective_step_size(torch.tensor(3), 0.1)
    )
    change = tree.change(before.server["params"], after.server["params"])
    for name, value in change.items():
        torch.testing.assert_close(-step_size * seen.gradient[name], value, rtol=1e-3, atol=1e-6)


def test_augmented_examples_are_compared_as_they_were_trained_on(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", augment="on")
    audited = open_run(path, UserObjects())
    assert truth_cost(audited, AuditCase(1, 4), [2]) < 1e-5


def test_images_are_unnormalized_to_values_between_0_and_1(fedavg_run: Path) -> None:
    audited = open_run(fedavg_run, UserObjects())
    data = audited.prepared.data
    unit = value_range(audited.prepared).to_unit(data.to_inputs(data.train_x[:5]))
    torch.testing.assert_close(unit, data.train_x[:5] / 255)


def test_run_with_fedcog_gets_all_parts(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", FedCOG(count=8, steps=2, start_round=1))
    found = audit_run(path, FAST, UserObjects())
    assert "note" not in found.membership and found.membership["generated"] == 4 * 8
    assert {"pixels", "features", "model"} <= found.membership.keys()
    assert len(found.attacks) == 6 and not found.inversion_note


def test_run_without_fedcog_gets_a_note_and_the_models_auc(fedavg_run: Path) -> None:
    found = audit_run(fedavg_run, FAST, UserObjects())
    assert "generates no inputs" in found.membership["note"]
    assert 0 <= found.membership["model"]["auc"] <= 1 and "pixels" not in found.membership


def test_fedcog_before_its_start_gets_a_note(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", FedCOG(count=8, steps=2, start_round=50))
    found = audit_run(path, FAST, UserObjects())
    assert "no inputs in round 3" in found.membership["note"]


def test_attacks_cover_three_cases_and_two_targets(fedavg_run: Path) -> None:
    shown: list[tuple[int, int]] = []
    found = audit_run(
        fedavg_run,
        FAST,
        UserObjects(),
        on_progress=lambda attack, done, total, cost: shown.append((done, total)),
    )
    cases = ["1 step, 1 example", "1 step, 8 examples", "3 steps, 8 examples (as in the run)"]
    assert [(one.case, one.target) for one in found.attacks] == [
        (case, target) for case in cases for target in ("client", "sum")
    ]
    assert [one.num_examples for one in found.attacks] == [1, 4, 8, 32, 24, 96]
    assert [one.num_inputs for one in found.attacks] == [1, 4, 8, 16, 16, 16]
    for one in found.attacks:
        assert one.baselines.keys() == {"mean", "noise", "others"}
        assert one.pictures is not None and one.pictures.dtype == torch.uint8
        assert one.pictures.shape == (2, one.num_inputs, 1, 8, 8) == (2, len(one.classes), 1, 8, 8)
        assert one.best_psnr >= one.psnr and one.label_recovery is not None
    assert shown[-1] == (18, 18)
    assert found.attacks[0].label_recovery == 1
    text = json.dumps(found.to_dict())
    assert "commit" in text and "proves no privacy" in text


def test_mlp_gives_one_example_away_exactly(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", model="mlp")
    settings = AuditSettings(iterations=3, steps=1, examples=1)
    first, total = audit_run(path, settings, UserObjects()).attacks
    assert first.is_closed_form and first.psnr > 50 > total.psnr
    assert first.psnr > first.baseline + 30


def test_chosen_client_is_attacked(fedavg_run: Path, tmp_path: Path) -> None:
    settings = replace(FAST, client=3, steps=1, examples=1)
    assert audit_run(fedavg_run, settings, UserObjects()).settings["client"] == 3
    partial = recorded(tmp_path / "run", participation=0.25)
    sampled = open_run(partial, UserObjects()).client
    other = (sampled + 1) % 4
    audited = open_run(partial, UserObjects(), client=other)
    assert audited.request.client_ids == [other]
    assert f"Client {other} takes the place of client {sampled}" in audited.notes[0]


@pytest.mark.parametrize("noise_at", ["central", "local"])
def test_private_updates_are_clipped_and_noised(tmp_path: Path, noise_at: str) -> None:
    pytest.importorskip("dp_accounting")
    path = recorded(tmp_path / "run", privacy=noise_at, dp_clip=0.01, dp_noise=1.0)
    audited = open_run(path, UserObjects())
    one = truth_cost(audited, AuditCase(1, 1), [0])
    every = truth_cost(audited, AuditCase(1, 1), audited.request.client_ids, is_sum=True)
    assert every > 0.5
    assert (one > 0.5) == (noise_at == "local")
    notes = audit_run(path, replace(FAST, steps=1), UserObjects()).notes
    assert any(f"{noise_at} differential privacy" in note for note in notes)


def test_vectors_are_attacked_without_pictures(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(120, 6, generator=draw)
    y = torch.arange(120) % 3
    data = fedcog.from_arrays(x[:80], y[:80], x[80:], y[80:])
    path = recorded(tmp_path / "run", data=data)
    settings = AuditSettings(iterations=3, steps=1, examples=1)
    found = audit_run(path, settings, UserObjects(data=data))
    assert found.attacks[0].is_closed_form and found.attacks[0].pictures is None


class Words(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.head = nn.Linear(6, 3)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.table(tokens)
        return embedded

    def forward_embedded(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.mean(1))
        return logits


def test_tokens_are_refused_with_the_reason(tmp_path: Path) -> None:
    tokens = torch.arange(120 * 5).reshape(120, 5) % 20
    y = torch.arange(120) % 3
    data = fedcog.from_arrays(tokens[:80], y[:80], tokens[80:], y[80:])
    path = recorded(tmp_path / "run", data=data, network=Words)
    found = audit_run(path, FAST, UserObjects(data=data, model=Words))
    assert "tokens" in found.inversion_note and found.attacks == []


def test_private_heads_are_refused_with_the_reason(tmp_path: Path) -> None:
    audited = open_run(recorded(tmp_path / "run", FedRep()), UserObjects())
    assert "whole model" in refusal(audited)


def test_batch_norm_on_a_single_value_is_reported_as_not_possible(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    path = recorded(tmp_path / "run", network=network)
    found = audit_run(path, FAST, UserObjects(model=network))
    problems = [bool(one.problem) for one in found.attacks]
    assert problems == [True, True, False, False, False, False]
    assert any("BatchNorm: client and attacker" in note for note in found.notes)


def test_unknown_client_is_an_error(fedavg_run: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        open_run(fedavg_run, UserObjects(), client=4)
    assert raised.value.faults == ["client 4 is unknown: this run has clients 0 to 3."]


def test_missing_run_and_missing_checkpoint_are_errors(fedavg_run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no run in"):
        audit_run(tmp_path, FAST, UserObjects())
    (tmp_path / "experiment.toml").write_text((fedavg_run / "experiment.toml").read_text())
    with pytest.raises(RecordError, match="no checkpoint to audit: wait for its first"):
        audit_run(tmp_path, FAST, UserObjects())


def test_unfinished_run_is_audited_with_a_note(tmp_path: Path) -> None:
    with pytest.raises(fedcog.Interrupted):
        fedcog.run(Experiment(**SMALL), tmp_path, should_stop=lambda: True, report=False)
    notes = open_run(tmp_path, UserObjects()).notes
    assert notes == ["The run is not finished: the audit is about round 2 of 2."]


def test_other_data_are_refused(tmp_path: Path) -> None:
    x = torch.rand(60, 5)
    y = torch.arange(60) % 3
    data = fedcog.from_arrays(x, y, x, y)
    path = recorded(tmp_path / "run", data=data)
    other = fedcog.from_arrays(x + 1, y, x, y)
    with pytest.raises(RecordError, match="the data are not the one"):
        open_run(path, UserObjects(data=other))


def test_invalid_settings_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        AuditSettings(steps=0, iterations=-1, tv=-1.0, seed=-1)
    assert len(raised.value.faults) == 4


@dataclass(frozen=True)
class Mine(Algorithm):
    """FedAvg under another name."""


def test_own_algorithm_is_passed(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", Mine())
    with pytest.raises(ConfigError, match="your own algorithm"):
        open_run(path, UserObjects())
    audited = open_run(path, UserObjects(), Mine())
    assert truth_cost(audited, AuditCase(1, 1), [0]) < 1e-5


def test_audit_in_python_writes_both_files(fedavg_run: Path) -> None:
    found = fedcog.audit(fedavg_run, steps=1, examples=1, iterations=2, seed=5)
    record = json.loads((fedavg_run / "audit.json").read_text())
    assert record["settings"]["seed"] == 5 and record["settings"]["client"] == 0
    assert [one["target"] for one in record["inversion"]["attacks"]] == ["client", "sum"]
    assert record["inversion"]["attacks"][0]["psnr"] == found.attacks[0].psnr
    assert (fedavg_run / "audit.html").read_text().count("<img") == 2 * (1 + 4)
    with pytest.raises(TypeError, match="Did you mean 'iterations'"):
        fedcog.audit(fedavg_run, iteration=2)  # type: ignore[call-arg]
