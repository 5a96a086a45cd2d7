"""Examples of several labels: what they mean, against scikit-learn, SciPy and a pencil, and whole
runs with them.
"""

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
task = MultiLabel(CLASSES)
logits = arrays.arrays(np.float64, (3, CLASSES), elements=st.floats(-15, 15))
sane = {
    name: one
    for name, one in ALL_ALGORITHMS.items()
    if not any(layer.single_label_reason for _, layer in named_layers(one))
}


def bernoulli(p: np.ndarray) -> np.ndarray:
    return np.stack([p, 1 - p])


@given(logits, logits, arrays.arrays(bool, (3, CLASSES)))
def test_losses_agree_with_scipy(one: np.ndarray, other: np.ndarray, labels: np.ndarray) -> None:
    a = torch.tensor(one)
    b = torch.tensor(other)
    p = bernoulli(expit(one))
    q = bernoulli(expit(other))
    assert task.distillation_loss(a, b).numpy() == pytest.approx(
        entropy(p, q).sum(-1), rel=1e-6, abs=1e-6
    )
    middle = (p + q) / 2
    between = ((entropy(p, middle) + entropy(q, middle)) / 2).mean(-1)
    assert task.divergence(a, b).numpy() == pytest.approx(between, rel=1e-6, abs=1e-9)
    each = [
        log_loss(row, np.clip(expit(out), 1e-15, 1 - 1e-15), labels=[False, True])
        for row, out in zip(labels, one, strict=True)
    ]
    assert task.loss(a, torch.tensor(labels)).numpy() == pytest.approx(each, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", [50.0, 5000.0])
def test_disagreement_of_certain_models_is_finite_and_so_is_its_gradient(size: float) -> None:
    one = torch.full((1, CLASSES), size, requires_grad=True)
    other = torch.full((1, CLASSES), -size, requires_grad=True)
    value = task.divergence(one, other)
    assert value.item() == pytest.approx(math.log(2), rel=1e-5)
    value.sum().backward()
    assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in (one, other))


@settings(max_examples=200)
@given(st.integers(1, 30), st.integers(0, 2**31), st.booleans())
def test_marks_are_those_of_scikit_learn(size: int, seed: int, ties: bool) -> None:
    draw = np.random.default_rng(seed)
    scores = (
        draw.integers(-2, 3, (size, CLASSES)).astype(float)
        if ties
        else draw.normal(size=(size, CLASSES))
    )
    labels = draw.random((size, CLASSES)) < 0.4
    outputs = torch.tensor(scores)
    truth = torch.tensor(labels)
    marks = {name: float(value) for name, value in task.extra_metrics(outputs, truth).items()}
    for kind, average in (("c", "macro"), ("o", "micro"), ("s", "samples")):
        wanted = precision_recall_fscore_support(
            labels, scores > 0, average=average, zero_division=0
        )[:3]
        assert [marks[f"{kind}_{name}"] for name in ("p", "r", "f1")] == pytest.approx(wanted)
    there = labels.any(0)
    wanted = (
        np.mean(
            [average_precision_score(labels[:, c], scores[:, c]) for c in np.flatnonzero(there)]
        )
        if there.any()
        else 0
    )
    assert marks["map"] == pytest.approx(wanted)
    totals = task.class_counts(truth)
    hits = task.class_stats(outputs, truth)
    assert task.score(hits, totals) == pytest.approx(
        f1_score(labels, scores > 0, average="micro", zero_division=0)
    )
    assert bool((hits <= task.max_class_stats(totals, size)).all())
    assert {*marks, *METRIC_LABELS} - {"accuracy"} == {*EXTRA_METRICS, "o_f1"}


def test_f1_on_a_clients_own_mix_by_pencil() -> None:
    hits = torch.tensor([[3, 1, 0, 0], [4, 1, 0, 2]])
    totals = torch.tensor([5, 2, 1, 1])
    mix = torch.tensor([3, 1, 0, 0])
    assert task.score(hits, totals) == pytest.approx(2 * 4 / (7 + 9))
    assert task.score(hits, totals, mix) == pytest.approx(
        2 * (3 * 3 + 1) / (3 * (4 + 5) + 1 * (1 + 2))
    )


def test_targets_have_as_many_labels_as_own_examples_and_those_that_are_missing() -> None:
    labels = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]).bool()
    counts = task.class_counts(labels)
    sizes = task.label_set_sizes(labels)
    assert counts.tolist() == [4, 1, 1, 0] and sizes.tolist() == [0, 2, 2, 0, 0]
    chance = torch.rand(40_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    asked = task.targets(counts, sizes, "complementary", chance)
    number = asked.sum(-1)
    assert not bool(asked[:, 0].any()) and {*number.tolist()} == {1, 2}
    assert float((number == 1).double().mean()) == pytest.approx(0.5, abs=0.01)
    alone = asked[number == 1].double().mean(0)
    assert alone.tolist() == pytest.approx([0, 0.3, 0.3, 0.4], abs=0.01)  # 3, 3 and 4 are missing
    pairs = asked[number == 2].double().mean(0)  # first 1 of (3, 3, 4), then one of the others
    assert float(pairs[3]) == pytest.approx(0.4 + 2 * 0.3 * 4 / 7, abs=0.01)
    even = task.targets(counts, sizes, "uniform", chance)
    assert even.double().mean(0).tolist() == pytest.approx([1.5 / 4] * 4, abs=0.01)
    rich = torch.tensor([7, 7, 7, 7])  # who lacks nothing asks for all alike
    assert torch.equal(task.targets(rich, sizes, "complementary", chance), even)
    many = torch.tensor([0, 0, 0, 0, 4])  # all of its examples have all labels, and two are missing
    assert task.targets(torch.tensor([4, 4, 1, 1]), many, "complementary", chance).sum(
        -1
    ).unique().tolist() == [2]


@pytest.mark.parametrize("name", sane)
def test_every_algorithm_that_makes_sense_trains_alone_as_together(name: str) -> None:
    runs = [
        ToyFederation(sane[name], mapping, dataset=random_multi_label(), rounds=3)
        for mapping in ("loop", "vmap")
    ]
    assert max_difference(*(run.final_state() for run in runs)) < 1e-9
    broadcast = sane[name].broadcast(runs[0].server.state)
    template = runs[0].simulator.answer_template(sane[name], broadcast)
    assert template["class_stats"].shape == (1, 2, CLASSES)


def test_fedcog_distils_on_what_it_generates_for_rows_of_labels() -> None:
    """The first round's data loss by hand, from the draft that the algorithm itself makes."""
    cog = dataclasses.replace(FEDCOG, weighting="balanced")
    _, client, made = generate_inputs(cog, dataset=random_multi_label())
    assert made["y"].dtype == torch.bool and made["y"].shape == (cog.count, CLASSES)
    batch = {"x": made["x"][:2], "y": made["y"][:2], "made": made}
    params = {name: value * 1.1 for name, value in client.broadcast["params"].items()}
    outputs = cog.outputs(params, batch, client)
    teacher, student = (torch.sigmoid(one) for one in (made["logits"], outputs["made"]))
    kl = teacher * (teacher / student).log() + (1 - teacher) * ((1 - teacher) / (1 - student)).log()
    missing = float((client.class_counts.max() - client.class_counts).sum())
    share = missing / (missing + float(client.class_counts.sum()))
    real = torch.nn.functional.binary_cross_entropy_with_logits(
        outputs["logits"], batch["y"].double()
    )
    wanted = (1 - share) * real + share * kl.sum(-1).mean()
    assert float(cog.data_loss(outputs, batch, client)) == pytest.approx(float(wanted), rel=1e-9)


def test_a_client_whose_examples_have_no_label_trains_like_any_other() -> None:
    data = random_multi_label()
    rows = data.train_y.clone()
    rows[:50] = False  # all of the first client's
    toy = ToyFederation(FEDCOG, dataset=dataclasses.replace(data, train_y=rows), rounds=3)
    lines = [done.record.to_line() for done in toy.run()]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["local"][0]["own_o_f1"] == 0  # of nothing


def experiment(**own: object) -> Experiment:
    usual = {
        "algorithm": FedCOG(FedProx(), count=8, steps=3, start_round=1),
        "partition": "iid",
        "rounds": 3,
    }
    usual |= {
        "clients": 3,
        "local_steps": 3,
        "batch_size": 8,
        "validation": 0.2,
        "threads": 1,
        "model": "small",
    }
    return Experiment(**usual | own)  # type: ignore[arg-type]


def test_a_run_says_what_scikit_learn_would(tmp_path: Path) -> None:
    data = random_multi_label(num_train=120, num_test=40)
    run = fedcog.run(experiment(), tmp_path / "run", data=data)
    line = run.lines[-1]
    assert (
        run.metric == "o_f1"
        and run.last == line["o_f1"]
        and run.best >= run.last
        and len(run.personal) == 3
    )
    assert {
        *EXTRA_METRICS,
        "validation_o_f1",
        "personal_o_f1",
    } <= line.keys() and "accuracy" not in line
    predicted = predictions(tmp_path / "run", data)
    truth = data.test_y.numpy()
    assert line["c_f1"] == pytest.approx(
        f1_score(truth, predicted > 0, average="macro", zero_division=0)
    )
    assert line["o_f1"] == pytest.approx(
        f1_score(truth, predicted > 0, average="micro", zero_division=0)
    )
    there = np.flatnonzero(truth.any(0))
    wanted = np.mean(
        [average_precision_score(truth[:, label], predicted[:, label]) for label in there]
    )
    assert line["map"] == pytest.approx(wanted, rel=1e-5)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "O-F1 over rounds" in page and "Last O-F1 (%)" in page and "ccuracy" not in page


def predictions(path: Path, data: fedcog.Dataset) -> np.ndarray:
    """The outputs of the network in a run's checkpoint, by plain torch."""
    checkpoint = RunDirectory(path).load()
    assert checkpoint is not None
    network = build("small", data.input_shape, CLASSES, 0)
    network.load_state_dict(checkpoint.server["params"])
    x = data.test_x.float() / 255
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (data.mean, data.std))
    with torch.no_grad():
        return network.eval()((x - mean) / std).numpy()


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    data = random_multi_label(num_train=120, num_test=40)
    whole = fedcog.run(experiment(), tmp_path / "whole", data=data, report=False)
    fedcog.run(experiment(rounds=2), tmp_path / "parts", data=data, report=False)
    parts = fedcog.run(experiment(), tmp_path / "parts", data=data, report=False, resume=True)
    one, other = (RunDirectory(run.path).load() for run in (whole, parts))
    assert one is not None and other is not None
    flat = [tree.flatten(found.server) | found.clients for found in (one, other)]
    assert all(torch.equal(value, flat[1][name]) for name, value in flat[0].items())


@pytest.mark.parametrize(
    ("name", "why"),
    [("vhl", "of its class"), ("fedreg", "no class to leave"), ("fedgen", "one label at a time")],
)
def test_what_needs_one_label_says_why(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        fedcog.run(
            experiment(algorithm=make_algorithm(f"{name}+fedcog")),
            tmp_path / "run",
            data=random_multi_label(),
        )


def test_a_partition_by_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="may have several labels: choose iid"):
        fedcog.run(experiment(partition="dirichlet"), tmp_path / "run", data=random_multi_label())


def test_labels_may_be_given_as_sets_of_names_or_as_rows() -> None:
    x = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    sets = [{"sea", "boat"}, {"sea"}, set()]
    named = from_arrays(x, sets, x, [["boat"], ["sea"], ("sea", "boat")])
    assert named.multi_label and named.classes == ("boat", "sea")
    assert named.train_y.tolist() == [[True, True], [False, True], [False, False]]
    rows = from_arrays(x, named.train_y, x, named.test_y.numpy(), classes=["boat", "sea"])
    assert torch.equal(rows.train_y, named.train_y) and rows.fingerprint == named.fingerprint
    lists = from_arrays(
        x, named.train_y.tolist(), x, list(named.test_y.numpy()), classes=["boat", "sea"]
    )
    assert lists.fingerprint == named.fingerprint
    objects = from_arrays(
        x, np.array(sets, dtype=object), x, sets, classes=np.array(["boat", "sea"])
    )  # type: ignore[arg-type]
    assert torch.equal(objects.train_y, named.train_y) and objects.classes == ("boat", "sea")
    empty = from_arrays(x, [set()] * 3, x, [set()] * 3, classes=["boat", "sea"])
    assert empty.multi_label and not empty.train_y.any()
    pairs = [(x[place], named.train_y[place]) for place in range(3)]
    assert torch.equal(fedcog.data.from_torch(pairs, pairs).train_y, named.train_y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "why"),
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
            r"\['c'\] are not among classes",
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
        (lambda x: from_arrays(x, [{"a"}] * 3, x, None), "test_y has None"),
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
def test_labels_that_are_neither_are_refused(
    make: Callable[[torch.Tensor], object], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        make(torch.zeros(3, 1, 8, 8, dtype=torch.uint8))


def test_a_run_begins_with_the_weights_it_is_given(tmp_path: Path) -> None:
    """One round of one tiny step from them ends near them; another file is another run."""
    data = random_multi_label(num_train=60, num_test=20)
    given = build("small", data.input_shape, CLASSES, seed=7).state_dict()
    save_file(given, tmp_path / "given.safetensors")
    one = experiment(
        rounds=1, local_steps=1, lr=1e-9, pretrained=str(tmp_path / "given.safetensors")
    )
    run = fedcog.run(one, tmp_path / "run", data=data, report=False)
    checkpoint = RunDirectory(run.path).load()
    assert checkpoint is not None
    assert all(
        torch.allclose(value, given[name], atol=1e-6)
        for name, value in checkpoint.server["params"].items()
    )
    save_file({name: 2 * value for name, value in given.items()}, tmp_path / "given.safetensors")
    with pytest.raises(RecordError, match="network"):
        fedcog.run(one, tmp_path / "run", data=data, report=False, resume=True)
