"""Every client's own test examples: what is held out, what is scored, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcog
from fedcog import ConfigError, Ditto, Experiment, FedAvg, FedCOG, FedRep
from fedcog.cli.output import print_results
from fedcog.data import registry, shifts
from fedcog.data.datasets import DataWarning
from fedcog.data.local_tests import LocalTests
from fedcog.engine.evaluation import _client_values
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.runs.scoring import _weighted_mean
from fedcog.runs.setup import ExperimentSetup, split_dataset

TINY = Experiment(
    clients=5,
    rounds=2,
    local_steps=4,
    batch_size=16,
    lr=0.1,
    local_test=0.25,
    threads=1,
    workers=1,
)


def vectors(number: int = 400, **options: object) -> fedcog.Dataset:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(number, 6)).astype("f4")
    y = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)
    return fedcog.from_arrays(x, y.astype(np.int64), **options)  # type: ignore[arg-type]


def test_held_out_examples_are_never_trained_on() -> None:
    setup = ExperimentSetup(TINY)
    tests = setup.data.local_tests
    assert tests is not None
    parts = split_dataset(TINY, registry.load("digits"))
    for client, part in enumerate(parts):
        kept = setup.indices[client]
        own = torch.split(tests.x, tests.sizes.tolist())[client]
        held_out = part[~torch.isin(part, kept)]
        assert len(held_out) == round(0.25 * len(part)) == len(own)
        assert torch.equal(own, setup.dataset.train_x[held_out])


def test_test_examples_are_shifted_as_the_client_is_and_keep_their_labels() -> None:
    shifted = dataclasses.replace(TINY, shift="rotation", label_noise=0.9)
    setup = ExperimentSetup(shifted)
    tests = setup.data.local_tests
    assert tests is not None
    original = registry.load("digits")
    plain = ExperimentSetup(TINY)
    plain_tests = plain.data.local_tests
    assert plain_tests is not None
    assert torch.equal(tests.y, plain_tests.y), "label noise is for training"
    own = torch.split(plain_tests.x, plain_tests.sizes.tolist())
    expected = [
        shifts.shift_inputs(original, x, client, "rotation", 0.5, 0) for client, x in enumerate(own)
    ]
    assert torch.equal(tests.x, torch.cat(expected))
    assert not torch.equal(tests.x, plain_tests.x)


def model_accuracy(model: torch.nn.Module, setup: ExperimentSetup, client: int) -> float:
    """Accuracy of a model on a client's test examples, by a plain loop."""
    tests = setup.data.local_tests
    assert tests is not None
    x = torch.split(tests.x, tests.sizes.tolist())[client]
    y = torch.split(tests.y, tests.sizes.tolist())[client]
    with torch.no_grad():
        logits = model(setup.data.to_inputs(x))
    return float((logits.argmax(1) == y).double().mean())


def test_scores_equal_a_plain_evaluation_of_the_final_model(tmp_path: Path) -> None:
    run = fedcog.run(TINY, tmp_path / "run", report=False)
    local_test = run.lines[-1]["local_test"]
    setup = ExperimentSetup(TINY)
    model = fedcog.load(tmp_path / "run")
    scores = [model_accuracy(model, setup, client) for client in range(5)]
    sizes = np.array(local_test["clients"]["examples"])
    assert local_test["clients"]["accuracy"] == pytest.approx(scores)
    assert local_test["accuracy"] == pytest.approx(float(np.average(scores, weights=sizes)))
    assert local_test["accuracy_mean"] == pytest.approx(float(np.mean(scores)))
    assert local_test["accuracy_worst"] == pytest.approx(min(scores))
    assert local_test["accuracy_deviation"] == pytest.approx(float(np.std(scores)))
    assert run.local_test("accuracy_mean")[-1] == (2, local_test["accuracy_mean"])


def test_all_clients_are_evaluated_and_not_only_those_of_the_round(tmp_path: Path) -> None:
    few = dataclasses.replace(TINY, participation=0.2, algorithm=Ditto())
    run = fedcog.run(few, tmp_path, report=False)
    assert len(run.lines[-1]["clients"]) == 1
    assert run.lines[-1]["local_test"]["clients"]["ids"] == [0, 1, 2, 3, 4]


def test_personal_models_are_those_that_clients_keep(tmp_path: Path) -> None:
    experiment = dataclasses.replace(TINY, algorithm=Ditto(), rounds=3)
    run = fedcog.run(experiment, tmp_path, report=False)
    setup = ExperimentSetup(experiment)
    checkpoint = RunDirectory(tmp_path).load()
    assert checkpoint is not None
    found = run.lines[-1]["local_test"]["clients"]["personal_accuracy"]
    model = fedcog.load(tmp_path)
    for client in range(5):
        # Ditto keeps a client's model under names of its own: see `decisions.md`.
        for name, value in model.state_dict().items():
            value.copy_(checkpoint.clients[f"{client}::personal::{name}"])
        assert model_accuracy(model, setup, client) == pytest.approx(found[client])


@pytest.mark.parametrize("algorithm", [FedAvg(), FedRep(), Ditto(), FedCOG(count=8, steps=2)])
def test_loop_and_vmap_agree(algorithm: fedcog.Algorithm, tmp_path: Path) -> None:
    tables = []
    for mapping in ("loop", "vmap"):
        mapped = dataclasses.replace(
            TINY, algorithm=algorithm, mapping=mapping, precision="float64"
        )
        run = fedcog.run(mapped, tmp_path / mapping, report=False)
        tables.append(json.dumps([line["local_test"] for line in run.lines]))
    assert tables[0] == tables[1]


def test_evaluation_changes_nothing_else(tmp_path: Path) -> None:
    """The held-out examples are removed either way; whether they are scored moves no weight."""
    runs = []
    for every in (1, 2):
        experiment = dataclasses.replace(TINY, algorithm=Ditto(), evaluate_every=every)
        runs.append(fedcog.run(experiment, tmp_path / str(every), report=False))
    assert runs[0].lines[-1]["loss"] == runs[1].lines[-1]["loss"]
    assert runs[0].lines[-1]["local_test"] == runs[1].lines[-1]["local_test"]


def test_runs_without_a_test_set_at_the_server(tmp_path: Path) -> None:
    run = fedcog.run(TINY, tmp_path / "run", data=vectors(), metrics={"top": top_one})
    line = run.lines[-1]
    assert run.last == line["accuracy"] == line["local_test"]["accuracy"]
    assert line["evaluated_on"] == "clients"
    assert line["local_test"]["top"] == pytest.approx(line["accuracy"])
    assert "own_accuracy" not in line["local"][0]
    page = (tmp_path / "run/report.html").read_text()
    assert page.count("on the clients&#x27; own test examples") == 2 and "&amp;#x27;" not in page
    with pytest.raises(ConfigError, match=r"has no test set.*--local-test 0\.2"):
        fedcog.run(dataclasses.replace(TINY, local_test=0.0), tmp_path / "no", data=vectors())


def test_own_metric_leaves_out_clients_for_which_it_is_not_defined(tmp_path: Path) -> None:
    def first_client_only(logits: torch.Tensor, labels: torch.Tensor) -> float:
        calls.append(len(labels))
        return len(calls) / 10 if len(calls) <= 2 else math.nan

    calls: list[int] = []
    experiment = dataclasses.replace(TINY, rounds=1)
    run = fedcog.run(
        experiment, tmp_path, data=vectors(), metrics={"some": first_client_only}, report=False
    )
    tests = run.lines[-1]["local_test"]
    first, second = calls[:2]
    assert len(calls) == len(tests["clients"]["ids"]) > 2
    assert tests["some"] == pytest.approx((0.1 * first + 0.2 * second) / (first + second))
    assert tests["clients"]["some"][:3] == [0.1, 0.2, None]


def test_own_metric_is_not_recorded_where_logits_are_not_finite() -> None:
    tests = LocalTests(torch.zeros(5, 2), torch.zeros(5).long(), torch.tensor([2, 0, 3]))
    logits = torch.ones(5, 2)
    logits[3] = math.nan
    values = _client_values({"one": lambda logits, labels: 1.0}, logits, tests)["one"]
    assert values[0] == 1 and values[1].isnan() and values[2].isinf()
    assert math.isinf(_weighted_mean(values, tests.sizes))


def top_one(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == labels).double().mean()


def test_users_bring_their_own_test_examples(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(90, 6)).astype("f4")
    y = (x[:, 0] > 0).astype(np.int64)
    users = np.array(["ann", "bob", "cem"]).repeat(30)
    test_users = np.array(["bob"] * 20 + ["ann"] * 10)
    data = fedcog.from_arrays(x, y, x[:30], y[:30], users=users, test_users=test_users)
    experiment = dataclasses.replace(TINY, partition="natural", clients=3, local_test=0.0)
    run = fedcog.run(experiment, tmp_path, data=data, report=False)
    clients = run.lines[-1]["local_test"]["clients"]
    assert (clients["ids"], clients["examples"]) == ([0, 1], [10, 20])
    setup = ExperimentSetup(
        dataclasses.replace(experiment, dataset="custom"), UserObjects(data=data)
    )
    model = fedcog.load(tmp_path)
    expected = [model_accuracy(model, setup, client) for client in (0, 1)]
    assert clients["accuracy"] == pytest.approx(expected)


def test_own_test_examples_of_users_are_not_mixed_up_with_held_out_ones(tmp_path: Path) -> None:
    data = vectors(40, users=["a", "b"] * 20)
    tests = {"test_x": data.train_x[:4], "test_y": data.train_y[:4]}
    arrays = (data.train_x, data.train_y)
    with pytest.warns(UserWarning, match=r"1 users without training examples, such as 'A'"):
        typo = fedcog.from_arrays(
            *arrays, users=["a", "b"] * 20, test_users=["A", "b", "b", "b"], **tests
        )
    experiment = dataclasses.replace(TINY, clients=0, local_test=0.0, min_examples=1)
    run = fedcog.run(experiment, tmp_path, data=typo, report=False)
    assert run.lines[-1]["local_test"]["clients"]["ids"] == [1]
    with pytest.raises(ConfigError, match="users have test examples of their own"):
        ExperimentSetup(dataclasses.replace(experiment, local_test=0.5), UserObjects(data=typo))
    with pytest.warns(UserWarning, match="without training examples"):
        strangers = fedcog.from_arrays(
            *arrays, users=["a", "b"] * 20, test_users=["c"] * 4, **tests
        )
    with pytest.raises(ConfigError, match="no user of the training examples is among"):
        ExperimentSetup(experiment, UserObjects(data=strangers))


def test_further_metrics_of_personal_models_are_those_of_all_test_examples(tmp_path: Path) -> None:
    metrics = "balanced_accuracy,class_accuracy,ece"
    experiment = dataclasses.replace(TINY, algorithm=FedRep(), metrics=metrics)
    local_test = fedcog.run(experiment, tmp_path, report=False).lines[-1]["local_test"]
    setup = ExperimentSetup(experiment)
    assert setup.data.local_tests is not None
    counts = torch.bincount(setup.data.local_tests.y, minlength=10).double()
    for prefix in ("", "personal_"):
        per_class = local_test[f"{prefix}class_accuracy"]
        values = torch.tensor([math.nan if one is None else one for one in per_class]).double()
        assert local_test[f"{prefix}balanced_accuracy"] == pytest.approx(float(values.nanmean()))
        overall = float((values.nan_to_num() * counts).sum() / counts.sum())
        assert local_test[f"{prefix}accuracy"] == pytest.approx(overall)
    assert "personal_ece" not in local_test and 0 <= local_test["ece"] <= 1


def test_resume_is_byte_equal(tmp_path: Path) -> None:
    experiment = dataclasses.replace(TINY, algorithm=Ditto(), rounds=3)
    straight = fedcog.run(experiment, tmp_path / "a", report=False)
    fedcog.run(dataclasses.replace(experiment, rounds=1), tmp_path / "b", report=False)
    resumed = fedcog.run(experiment, tmp_path / "b", resume=True, report=False)
    assert [line["local_test"] for line in straight.lines] == [
        line["local_test"] for line in resumed.lines
    ]


def test_privacy_refuses_reports_that_it_does_not_account_for() -> None:
    with pytest.raises(ConfigError, match="privacy does not account for: set --local-test 0"):
        dataclasses.replace(TINY, privacy="central")


def test_privacy_evaluates_users_test_examples_together() -> None:
    users = np.arange(400) % 5
    experiment = dataclasses.replace(
        TINY, local_test=0.0, clients=0, model="mlp", privacy="central"
    )
    tests = {"test_x": np.zeros((10, 6), "f4"), "test_y": np.zeros(10, int)}
    dataset = vectors(users=users, test_users=np.arange(10) % 5, **tests)
    with pytest.warns(DataWarning, match="privacy does not account for reports"):
        setup = ExperimentSetup(experiment, UserObjects(preloaded=dataset))
    assert setup.data.local_tests is None and not setup.schedule.evaluate_clients
    assert len(setup.data.test_y) == 10
    with pytest.raises(ConfigError, match="has no test set: give it one; privacy"):
        ExperimentSetup(experiment, UserObjects(preloaded=vectors(users=users)))


def test_unknown_metrics_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="unknown metric 'balanced': did you mean balanced_acc"):
        dataclasses.replace(TINY, metrics="ece, balanced")


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    fedcog.run(dataclasses.replace(TINY, rounds=1), tmp_path, report=False)
    file = tmp_path / "rounds.jsonl"
    line = json.loads(file.read_text())
    bad_tables = [
        3,
        {"accuracy": "high"},
        {"clients": [1]},
        {"clients": {"ids": [0, 1], "examples": [1]}},
        {"class_accuracy": [{}]},
    ]
    for table in bad_tables:
        file.write_text(json.dumps(line | {"local_test": table}) + "\n")
        with pytest.raises(RecordError, match="local_test in line 1 is no table"):
            fedcog.read(tmp_path)


def test_trackers_receive_the_summary(tmp_path: Path) -> None:
    from fedcog.runs.tracking.values import round_metrics

    run = fedcog.run(dataclasses.replace(TINY, rounds=1, metrics="ece"), tmp_path, report=False)
    found = round_metrics(run.lines[-1])
    assert found["local_test/accuracy_worst"] == run.lines[-1]["local_test"]["accuracy_worst"]
    assert found["metrics/ece"] == run.lines[-1]["metrics"]["ece"]


def test_diverged_run_with_metrics_is_reported_as_diverged(tmp_path: Path) -> None:
    def strict(logits: torch.Tensor, labels: torch.Tensor) -> float:
        assert logits.isfinite().all()
        return 0.0

    diverging = dataclasses.replace(TINY, lr=1e18, metrics="ece", rounds=3)
    with pytest.raises(fedcog.Diverged):
        fedcog.run(diverging, tmp_path / "run", metrics={"strict": strict}, report=False)


def test_unusable_metrics_and_augmentations_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a setting: Experiment\(metrics='ece'\)"):
        fedcog.run(TINY, tmp_path, metrics="ece")  # type: ignore[arg-type]
    for metrics in (len, [len]):
        with pytest.raises(ConfigError, match="metrics needs functions by name"):
            fedcog.run(TINY, tmp_path, metrics=metrics)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="metric 5 is no valid name"):
        fedcog.run(TINY, tmp_path, metrics={5: len})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="augmentation='flip' is no function"):
        fedcog.run(TINY, tmp_path, augmentation="flip")  # type: ignore[arg-type]


def test_metric_that_is_never_a_number_is_no_unknown_one(tmp_path: Path) -> None:
    metrics = {"odd": lambda logits, labels: math.nan}
    run = fedcog.run(TINY, tmp_path / "run", metrics=metrics, report=False)
    for name in ("metrics/odd", "local_test/odd"):
        with pytest.raises(ConfigError, match=f"metric '{name}' is no number, or NaN"):
            fedcog.table(run, metric=name)
    with pytest.raises(ConfigError, match="unknown metric 'metrics/even'"):
        fedcog.table(run, metric="metrics/even")
    with pytest.raises(ConfigError, match="'seconds' has several values: choose seconds/"):
        fedcog.table(run, metric="seconds")


def test_validation_score_is_printed_without_test_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = dataclasses.replace(
        TINY, local_test=0.0, validation=0.2, evaluate_test=False, evaluate_local=False
    )
    run = fedcog.run(experiment, tmp_path / "run", report=False)
    print_results([run], "plain")
    score = 100 * run.lines[-1]["validation_accuracy"]
    assert f"fedavg: validation accuracy {score:.2f} %" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="name a metric, such as validation_accuracy"):
        fedcog.table(run)


def test_run_that_failed_before_round_1_may_start_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="metric 'bad' failed"):
        fedcog.run(TINY, tmp_path / "run", metrics={"bad": lambda logits, labels: 1 / 0})
    metrics = {"good": lambda logits, labels: 0.0}
    assert fedcog.run(TINY, tmp_path / "run", metrics=metrics, report=False).lines
