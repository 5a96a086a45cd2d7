"""Tests of multi-label data: losses and metrics against SciPy and scikit-learn, and runs."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file
from scipy.special import expit
from scipy.stats import entropy
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
)

import fedcog
from fedcog import Experiment, FedCOG, FedProx
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.core.tasks import EXTRA_METRICS, METRIC_LABELS, MultiLabel
from fedcog.data import DataError, from_arrays
from fedcog.data.partitions.schemes import PartitionError
from fedcog.models.zoo import build
from fedcog.runs.config.composition import make_algorithm, named_layers
from fedcog.runs.records.run_directory import RecordError, RunDirectory
from fedcog.testing import FEDCOG, ToyFederation, max_difference, random_multi_label
from tests.support.algorithm_settings import ALL_ALGORITHMS
from tests.support.generated_inputs import generate_inputs

CLASSES = 4
TASK = MultiLabel(CLASSES)
LOGITS = arrays.arrays(np.float64, (3, CLASSES), elements=st.floats(-15, 15))
MULTI_LABEL_ALGORITHMS = {
    name: algorithm
    for name, algorithm in ALL_ALGORITHMS.items()
    if not any(layer.single_label_reason for _, layer in named_layers(algorithm))
}


def bernoulli(p: np.ndarray) -> np.ndarray:
    return np.stack([p, 1 - p])


@pytest.mark.slow
@given(LOGITS, LOGITS, arrays.arrays(bool, (3, CLASSES)))
def test_losses_match_scipy_and_scikit_learn(
    logits_a: np.ndarray, logits_b: np.ndarray, labels: np.ndarray
) -> None:
    a = torch.tensor(logits_a)
    b = torch.tensor(logits_b)
    p = bernoulli(expit(logits_a))
    q = bernoulli(expit(logits_b))
    assert TASK.distillation_loss(a, b).numpy() == pytest.approx(
        entropy(p, q).sum(-1), rel=1e-6, abs=1e-6
    )
    mixture = (p + q) / 2
    jensen_shannon = ((entropy(p, mixture) + entropy(q, mixture)) / 2).mean(-1)
    assert TASK.divergence(a, b).numpy() == pytest.approx(jensen_shannon, rel=1e-6, abs=1e-9)
    log_losses = [
        log_loss(row, np.clip(expit(logits), 1e-15, 1 - 1e-15), labels=[False, True])
        for row, logits in zip(labels, logits_a, strict=True)
    ]
    assert TASK.loss(a, torch.tensor(labels)).numpy() == pytest.approx(
        log_losses, rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("size", [50.0, 5000.0])
def test_divergence_of_confident_models_has_finite_gradient(size: float) -> None:
    logits_a = torch.full((1, CLASSES), size, requires_grad=True)
    logits_b = torch.full((1, CLASSES), -size, requires_grad=True)
    value = TASK.divergence(logits_a, logits_b)
    assert value.item() == pytest.approx(math.log(2), rel=1e-5)
    value.sum().backward()
    assert all(
        leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in (logits_a, logits_b)
    )


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(1, 30), st.integers(0, 2**31), st.booleans())
def test_metrics_match_scikit_learn(size: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    if ties:
        scores = rng.integers(-2, 3, (size, CLASSES)).astype(float)
    else:
        scores = rng.normal(size=(size, CLASSES))
    labels = rng.random((size, CLASSES)) < 0.4
    outputs = torch.tensor(scores)
    targets = torch.tensor(labels)
    metrics = {name: float(value) for name, value in TASK.extra_metrics(outputs, targets).items()}
    for kind, average in (("c", "macro"), ("o", "micro"), ("s", "samples")):
        expected = precision_recall_fscore_support(
            labels, scores > 0, average=average, zero_division=0
        )[:3]
        assert [metrics[f"{kind}_{name}"] for name in ("p", "r", "f1")] == pytest.approx(expected)
    has_examples = labels.any(0)
    precisions = [
        average_precision_score(labels[:, c], scores[:, c]) for c in np.flatnonzero(has_examples)
    ]
    expected = np.mean(precisions) if precisions else 0
    assert metrics["map"] == pytest.approx(expected)
    totals = TASK.class_counts(targets)
    class_stats = TASK.class_stats(outputs, targets)
    assert TASK.score(class_stats, totals) == pytest.approx(
        f1_score(labels, scores > 0, average="micro", zero_division=0)
    )
    assert bool((class_stats <= TASK.max_class_stats(totals, size)).all())
    assert {*metrics, *METRIC_LABELS} - {"accuracy"} == {*EXTRA_METRICS, "o_f1"}


def test_f1_on_a_label_mix_matches_hand_calculation() -> None:
    class_stats = torch.tensor([[3, 1, 0, 0], [4, 1, 0, 2]])
    totals = torch.tensor([5, 2, 1, 1])
    mix = torch.tensor([3, 1, 0, 0])
    assert TASK.score(class_stats, totals) == pytest.approx(2 * 4 / (7 + 9))
    assert TASK.score(class_stats, totals, mix) == pytest.approx(
        2 * (3 * 3 + 1) / (3 * (4 + 5) + 1 * (1 + 2))
    )


def test_targets_follow_label_set_sizes_and_missing_classes() -> None:
    labels = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]).bool()
    counts = TASK.class_counts(labels)
    sizes = TASK.label_set_sizes(labels)
    assert counts.tolist() == [4, 1, 1, 0] and sizes.tolist() == [0, 2, 2, 0, 0]
    uniforms = torch.rand(
        40_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    targets = TASK.targets(counts, sizes, "complementary", uniforms)
    num_labels = targets.sum(-1)
    assert not bool(targets[:, 0].any()) and {*num_labels.tolist()} == {1, 2}
    assert float((num_labels == 1).double().mean()) == pytest.approx(0.5, abs=0.01)
    single = targets[num_labels == 1].double().mean(0)
    assert single.tolist() == pytest.approx([0, 0.3, 0.3, 0.4], abs=0.01)  # weights 3, 3 and 4
    # Pairs are drawn without replacement with the same weights.
    pairs = targets[num_labels == 2].double().mean(0)
    assert float(pairs[3]) == pytest.approx(0.4 + 2 * 0.3 * 4 / 7, abs=0.01)
    uniform_targets = TASK.targets(counts, sizes, "uniform", uniforms)
    assert uniform_targets.double().mean(0).tolist() == pytest.approx([1.5 / 4] * 4, abs=0.01)
    # A client without missing classes draws all classes uniformly.
    balanced_counts = torch.tensor([7, 7, 7, 7])
    balanced_targets = TASK.targets(balanced_counts, sizes, "complementary", uniforms)
    assert torch.equal(balanced_targets, uniform_targets)
    # Label sets are no larger than the number of missing classes, here 2.
    sizes = torch.tensor([0, 0, 0, 0, 4])
    targets = TASK.targets(torch.tensor([4, 4, 1, 1]), sizes, "complementary", uniforms)
    assert targets.sum(-1).unique().tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTI_LABEL_ALGORITHMS)
def test_loop_and_vmap_agree(name: str) -> None:
    algorithm = MULTI_LABEL_ALGORITHMS[name]
    loop, vmap = (
        ToyFederation(algorithm, mapping, dataset=random_multi_label(), rounds=3)
        for mapping in ("loop", "vmap")
    )
    assert max_difference(loop.final_state(), vmap.final_state()) < 1e-9
    broadcast = algorithm.broadcast(loop.server.state)
    template = loop.simulator.answer_template(algorithm, broadcast)
    assert template["class_stats"].shape == (1, 2, CLASSES)


def test_fedcog_data_loss_matches_hand_calculation() -> None:
    """The data loss of the first round, recalculated from the inputs that FedCOG generated."""
    algorithm = dataclasses.replace(FEDCOG, weighting="balanced")
    _, client, generated = generate_inputs(algorithm, dataset=random_multi_label())
    assert generated["y"].dtype == torch.bool and generated["y"].shape == (algorithm.count, CLASSES)
    batch = {"x": generated["x"][:2], "y": generated["y"][:2], "made": generated}
    params = {name: value * 1.1 for name, value in client.broadcast["params"].items()}
    outputs = algorithm.outputs(params, batch, client)
    teacher, student = (torch.sigmoid(logits) for logits in (generated["logits"], outputs["made"]))
    kl = teacher * (teacher / student).log() + (1 - teacher) * ((1 - teacher) / (1 - student)).log()
    num_missing = float((client.class_counts.max() - client.class_counts).sum())
    share = num_missing / (num_missing + float(client.class_counts.sum()))
    real_loss = torch.nn.functional.binary_cross_entropy_with_logits(
        outputs["logits"], batch["y"].double()
    )
    expected = (1 - share) * real_loss + share * kl.sum(-1).mean()
    assert float(algorithm.data_loss(outputs, batch, client)) == pytest.approx(
        float(expected), rel=1e-9
    )


def test_client_without_any_label_trains() -> None:
    data = random_multi_label()
    labels = data.train_y.clone()
    labels[:50] = False  # all examples of client 0
    toy = ToyFederation(FEDCOG, dataset=dataclasses.replace(data, train_y=labels), rounds=3)
    lines = [result.record.to_line() for result in toy.run()]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["local"][0]["own_o_f1"] == 0


def experiment(**changes: object) -> Experiment:
    defaults = {
        "algorithm": FedCOG(FedProx(), count=8, steps=3, start_round=1),
        "partition": "iid",
        "rounds": 3,
        "clients": 3,
        "local_steps": 3,
        "batch_size": 8,
        "validation": 0.2,
        "threads": 1,
        "model": "small",
    }
    return Experiment(**defaults | changes)  # type: ignore[arg-type]


def test_recorded_metrics_match_scikit_learn(tmp_path: Path) -> None:
    data = random_multi_label(num_train=120, num_test=40)
    run = fedcog.run(experiment(), tmp_path / "run", data=data)
    line = run.lines[-1]
    assert run.metric == "o_f1"
    assert run.last == line["o_f1"] and run.best >= run.last
    assert len(run.label_mix) == 3
    assert {*EXTRA_METRICS, "validation_o_f1", "label_mix_o_f1"} <= line.keys()
    assert "accuracy" not in line
    outputs = network_outputs(tmp_path / "run", data)
    labels = data.test_y.numpy()
    assert line["c_f1"] == pytest.approx(
        f1_score(labels, outputs > 0, average="macro", zero_division=0)
    )
    assert line["o_f1"] == pytest.approx(
        f1_score(labels, outputs > 0, average="micro", zero_division=0)
    )
    classes_present = np.flatnonzero(labels.any(0))
    mean_precision = np.mean(
        [average_precision_score(labels[:, c], outputs[:, c]) for c in classes_present]
    )
    assert line["map"] == pytest.approx(mean_precision, rel=1e-5)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "O-F1 over rounds" in page and "Last O-F1 (%)" in page
    assert "ccuracy" not in page.replace("balanced_accuracy, class_accuracy", "")


def network_outputs(path: Path, data: fedcog.Dataset) -> np.ndarray:
    """Outputs of a run's network on the test set, calculated with plain torch."""
    checkpoint = RunDirectory(path).load()
    assert checkpoint is not None
    network = build("small", data.input_shape, CLASSES, 0)
    network.load_state_dict(checkpoint.server["params"])
    x = data.test_x.float() / 255
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (data.mean, data.std))
    with torch.no_grad():
        return network.eval()((x - mean) / std).numpy()


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    data = random_multi_label(num_train=120, num_test=40)
    uninterrupted = fedcog.run(experiment(), tmp_path / "whole", data=data, report=False)
    fedcog.run(experiment(rounds=2), tmp_path / "parts", data=data, report=False)
    resumed = fedcog.run(experiment(), tmp_path / "parts", data=data, report=False, resume=True)
    states = []
    for run in (uninterrupted, resumed):
        checkpoint = RunDirectory(run.path).load()
        assert checkpoint is not None
        states.append(tree.flatten(checkpoint.server) | checkpoint.clients)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    ("name", "reason"),
    [("vhl", "of its class"), ("fedreg", "no class to leave"), ("fedgen", "one label at a time")],
)
def test_single_label_algorithms_are_refused_with_a_reason(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        fedcog.run(
            experiment(algorithm=make_algorithm(f"{name}+fedcog")),
            tmp_path / "run",
            data=random_multi_label(),
        )


def test_partition_by_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="may have several labels: choose iid"):
        fedcog.run(experiment(partition="dirichlet"), tmp_path / "run", data=random_multi_label())


def test_labels_may_be_sets_of_names_or_boolean_rows() -> None:
    x = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    label_sets = [{"sea", "boat"}, {"sea"}, set()]
    named = from_arrays(x, label_sets, x, [["boat"], ["sea"], ("sea", "boat")])
    assert named.multi_label and named.classes == ("boat", "sea")
    assert named.train_y.tolist() == [[True, True], [False, True], [False, False]]
    rows = from_arrays(x, named.train_y, x, named.test_y.numpy(), classes=["boat", "sea"])
    assert torch.equal(rows.train_y, named.train_y) and rows.fingerprint == named.fingerprint
    lists = from_arrays(
        x, named.train_y.tolist(), x, list(named.test_y.numpy()), classes=["boat", "sea"]
    )
    assert lists.fingerprint == named.fingerprint
    objects = from_arrays(
        x,
        np.array(label_sets, dtype=object),
        x,
        label_sets,
        classes=np.array(["boat", "sea"]),  # type: ignore[arg-type]
    )
    assert torch.equal(objects.train_y, named.train_y) and objects.classes == ("boat", "sea")
    empty = from_arrays(x, [set()] * 3, x, [set()] * 3, classes=["boat", "sea"])
    assert empty.multi_label and not empty.train_y.any()
    pairs = [(x[i], named.train_y[i]) for i in range(3)]
    from_pairs = fedcog.data.from_torch(pairs, pairs)  # type: ignore[arg-type]
    assert torch.equal(from_pairs.train_y, named.train_y)


@pytest.mark.parametrize(
    ("make_dataset", "reason"),
    [
        (
            lambda x: from_arrays(x, [{"a"}, {1}, set()], x, [{"a"}] * 3),
            "a set of names for every example",
        ),
        (
            lambda x: from_arrays(x, [{"a"}, "b", set()], x, [{"a"}] * 3),
            "a set of names for every example",
        ),
        (
            lambda x: from_arrays(x, [{"a"}] * 3, x, [{"c"}] * 3, classes=["a", "b"]),
            "labels c are not among classes a, b",
        ),
        (
            lambda x: from_arrays(x, [{"a", "b"}] * 2, x, [{"a"}] * 3),
            "a row for each of 3 examples",
        ),
        (
            lambda x: from_arrays(x, torch.ones(3, 2).bool(), x, torch.ones(3, 4).bool()),
            "with all 2 classes",
        ),
        (
            lambda x: from_arrays(x, torch.eye(3, 2).long(), x, torch.eye(3, 2).long()),
            "rows of True and False",
        ),
        (lambda x: from_arrays(x, torch.ones(3, 2).bool(), x, [0, 1, 1]), "rows of True and False"),
        (lambda x: from_arrays(x, [{"a"}, None, {"b"}], x, [{"a"}] * 3), "train_y has None at 1"),
        (lambda x: from_arrays(x, [{"a"}] * 3, x, [0, 1, 2]), "test_y has 0 at 0"),
        (lambda x: from_arrays(x, [{"a"}] * 3, x, torch.tensor([0, 1, 2])), "test_y has tensor"),
        (lambda x: from_arrays(x, [{"a"}] * 3, x, None), "test_x is given without test_y"),
        (
            lambda x: from_arrays(x, [[True], [True, False], [True]], x, [[True]] * 3),
            "train_y has rows of 1 and of",
        ),
        (
            lambda x: from_arrays(x, torch.ones(3, 2), x, torch.ones(3, 2)),
            "rows of True and False if",
        ),
        (
            lambda x: from_arrays(x, [{"a"}] * 3, x, [{"a"}] * 3, classes=["a", "a"]),
            "names 'a' twice",
        ),
    ],
)
def test_invalid_labels_are_refused(
    make_dataset: Callable[[torch.Tensor], object], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        make_dataset(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))


def test_run_starts_from_pretrained_weights(tmp_path: Path) -> None:
    """One tiny step ends near the given weights; a changed file is refused on resume."""
    data = random_multi_label(num_train=60, num_test=20)
    weights = build("small", data.input_shape, CLASSES, seed=7).state_dict()
    save_file(weights, tmp_path / "given.safetensors")
    config = experiment(
        rounds=1, local_steps=1, lr=1e-9, pretrained=str(tmp_path / "given.safetensors")
    )
    run = fedcog.run(config, tmp_path / "run", data=data, report=False)
    checkpoint = RunDirectory(run.path).load()
    assert checkpoint is not None
    assert all(
        torch.allclose(value, weights[name], atol=1e-6)
        for name, value in checkpoint.server["params"].items()
    )
    save_file({name: 2 * value for name, value in weights.items()}, tmp_path / "given.safetensors")
    with pytest.raises(RecordError, match="network"):
        fedcog.run(config, tmp_path / "run", data=data, report=False, resume=True)
