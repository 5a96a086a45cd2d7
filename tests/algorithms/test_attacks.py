"""Tests of malicious clients: what they change, by hand and against honest clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedcog
from fedcog.algorithms import (
    Algorithm,
    Attack,
    FedAvg,
    FedCOG,
    FedLC,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedcog.algorithms.robust_rule import RobustRule
from fedcog.core import tree
from fedcog.core.settings import ConfigError
from fedcog.data import Dataset
from fedcog.engine.aggregation import add_totals
from fedcog.federation.backend import Diverged
from fedcog.federation.device_types import DeviceType
from fedcog.federation.simulator import LocalWorkload, Simulator
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.testing import NUM_CLASSES, ToyFederation, max_difference, random_images

SIZES = (18, 18, 18, 18, 18)
BRIGHT = (2.5,)


def federation(
    algorithm: Algorithm, attack: Attack | None, mapping: Any = "loop", **settings: Any
) -> ToyFederation:
    """Return five clients, of which the last two attack."""
    toy = ToyFederation(algorithm, mapping, sizes=SIZES, rounds=2, **settings)
    types = [DeviceType("honest", 3), DeviceType("attacker", 2, attack=attack)]
    workload = LocalWorkload(local_steps=4, device_types=types)
    toy.simulator = Simulator(toy.simulator.cohort, workload)
    toy.server.backend = toy.simulator
    return toy


def with_flipped_labels(dataset: Dataset) -> Dataset:
    labels = dataset.train_y.clone()
    labels[54:] = NUM_CLASSES - 1 - labels[54:]
    return replace(dataset, train_y=labels)


def test_no_attack_changes_nothing() -> None:
    expected = federation(FedAvg(), None).final_state()
    actual = federation(FedAvg(), Attack(kind="none")).final_state()
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FedLC(), FedCOG(count=8, steps=2, start_round=0)], ids=str
)
def test_label_flip_equals_training_on_flipped_labels(algorithm: Algorithm, mapping: str) -> None:
    """Counts, and so FedLC's margins and what FedCOG generates, follow the false labels."""
    attacked = federation(algorithm, Attack(kind="label-flip"), mapping)
    flipped = federation(algorithm, None, mapping, dataset=with_flipped_labels(random_images()))
    difference = max_difference(attacked.final_state(), flipped.final_state())
    assert difference < 1e-12


def test_label_flip_by_hand() -> None:
    all_classes = Attack(kind="label-flip")
    one_class = Attack(kind="label-flip", source=0, target=2)
    labels = torch.tensor([0, 1, 2, 0])
    assert all_classes.flipped(labels, 3).tolist() == [2, 1, 0, 2]
    assert one_class.flipped(labels, 3).tolist() == [2, 1, 2, 2]
    client = ToyFederation(FedAvg()).simulator
    counts = torch.tensor([6, 3, 1])

    class Client:
        class_counts = counts
        round = torch.tensor(0)

        def replace(self, class_counts: Tensor) -> Tensor:
            return class_counts

    assert client is not None
    assert all_classes._deceived(Client()).tolist() == [1, 3, 6]  # type: ignore[arg-type, attr-defined]
    assert one_class._deceived(Client()).tolist() == [0, 3, 7]  # type: ignore[arg-type, attr-defined]


def test_sign_flip_and_replacement_by_hand() -> None:
    """Four equal clients, three without change: the scaled update of the fourth is the mean."""
    payload = {
        "delta": {"x": torch.tensor(2.0)},
        "buffers": {"mean": torch.tensor(3.0)},
        "weight": torch.tensor(1.0),
        "per_client": {"robust": {"delta": {"x": torch.tensor(2.0)}, "weight": torch.tensor(1.0)}},
    }

    class Sender(Algorithm):
        def client_update(self, params, client, work):  # type: ignore[no-untyped-def]
            return {}, payload

    class Client:
        round = torch.tensor(0)
        class_counts = torch.ones(3)

    client: Any = Client()
    work: Any = None
    _, flipped = Attack(Sender(), kind="sign-flip", scale=3.0).client_update({}, client, work)
    assert float(flipped["delta"]["x"]) == -6 and float(flipped["buffers"]["mean"]) == -9
    assert float(flipped["weight"]) == 1
    assert float(flipped["per_client"]["robust"]["delta"]["x"]) == -6
    assert float(flipped["per_client"]["robust"]["weight"]) == 1
    replacement = Attack(Sender(), kind="replacement", scale=4.0, brightest=BRIGHT)
    _, replaced = replacement.client_update({}, client, work)
    assert float(replaced["delta"]["x"]) / 4 == 2


def test_trigger_is_stamped_into_a_share_of_the_batch() -> None:
    attack = Attack(kind="backdoor", share=0.5, target=2, brightest=BRIGHT)
    images = torch.zeros(4, 1, 8, 8)
    labels = torch.tensor([0, 1, 1, 3])
    poisoned = attack.poison({"x": images, "y": labels}, 4)
    assert poisoned["y"].tolist() == [2, 2, 1, 3]
    assert (poisoned["x"][:2, :, 4:, 4:] == 2.5).all() and (poisoned["x"] > 0).sum() == 2 * 16
    again = attack.poison(poisoned, 4)
    assert torch.equal(again["x"], poisoned["x"]) and torch.equal(again["y"], poisoned["y"])
    whole = replace(attack, share=1.0).poison({"x": images, "y": labels}, 4)
    assert whole["y"].tolist() == [2, 2, 2, 2]
    nothing = replace(attack, share=0.0).poison({"x": images, "y": labels}, 4)
    assert torch.equal(nothing["x"], images) and torch.equal(nothing["y"], labels)


def test_attack_ends_with_its_last_round() -> None:
    for kind in ("label-flip", "sign-flip", "replacement"):
        attack = Attack(kind=kind, until=1, scale=2.0, brightest=BRIGHT)  # type: ignore[arg-type]
        toy = federation(FedAvg(), attack)
        honest = federation(FedAvg(), None)
        first = toy.server.run_round(0).server
        expected_first = honest.server.run_round(0).server
        assert max_difference(first["params"], expected_first["params"]) > 1e-6
        honest.server.state = first
        second = toy.server.run_round(1).server
        expected_second = honest.server.run_round(1).server
        assert max_difference(second["params"], expected_second["params"]) < 1e-12


@pytest.mark.parametrize("kind", ["label-flip", "sign-flip", "backdoor", "replacement"])
def test_attackers_at_once_equal_attackers_one_by_one(kind: Any) -> None:
    attack = Attack(kind=kind, scale=3.0, brightest=BRIGHT)
    loop = federation(FedLC(), attack, "loop").final_state()
    vmap = federation(FedLC(), attack, "vmap").final_state()
    assert max_difference(loop, vmap) < 1e-12


def test_success_by_hand() -> None:
    decisions = torch.tensor([2, 2, 0, 2])
    labels = torch.tensor([0, 2, 1, 1])
    backdoor = Attack(kind="backdoor", target=2)
    assert float(backdoor.success(decisions, labels, 3)) == pytest.approx(2 / 3)
    flip = Attack(kind="label-flip")  # wants 2, 0, 1, 1: the last two labels stay
    assert float(flip.success(decisions, labels, 3)) == pytest.approx(1 / 2)
    source = Attack(kind="label-flip", source=1, target=0)
    assert float(source.success(decisions, labels, 3)) == pytest.approx(1 / 2)


def test_robust_means_resist_a_sign_flip() -> None:
    """No client moves further than an honest one; the mean is carried away."""
    attack = Attack(kind="sign-flip", scale=50.0)
    honest = federation(FedAvg(), None).server
    start = honest.state["params"]
    farthest = max(client["distance"] for client in honest.run_round(0).record.local)
    moved = {}
    for name, algorithm in {
        "mean": FedAvg(),
        "median": Median(),
        "krum": Krum(attackers=1),
    }.items():
        server = federation(algorithm, attack).server
        moved[name] = tree.norm(tree.subtract(server.run_round(0).server["params"], start))
    assert moved["mean"] > 3 * farthest
    assert moved["median"] < 1.5 * farthest and moved["krum"] <= farthest


def test_a_run_records_and_reports_clean_accuracy_and_attack_success(tmp_path: Path) -> None:
    experiment = Experiment(
        clients=4,
        rounds=3,
        local_steps=12,
        threads=1,
        device="cpu",
        devices="honest: clients=2; attacker: clients=2 attack=backdoor attack.target=3",
    )
    run = fedcog.run(experiment, tmp_path / "run")
    values = [line["attack_success"] for line in run.lines]
    assert all(0 <= value <= 1 for value in values) and values[-1] > 0.5
    assert all("accuracy" in line for line in run.lines)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "attack success" in report and "with the trigger for a backdoor" in report
    honest = fedcog.run(replace(experiment, devices=""), tmp_path / "honest", report=False)
    assert "attack_success" not in honest.lines[-1]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("attacker: clients=4 attack=trojan", "attack needs one of none, label-flip"),
        ("attacker: clients=4 attack.scale=3", "attack.scale needs an attack"),
        ("attacker: clients=4 attack=sign-flip attack.target=3", "sign-flip has no target"),
        ("attacker: clients=4 attack=backdoor attack.share=2", "attack.share needs a number"),
    ],
)
def test_wrong_attacks_are_refused(devices: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experiment(clients=4, devices=devices).validate()


def test_attacks_that_do_not_fit_the_data_are_refused(tmp_path: Path) -> None:
    devices = "attacker: clients=4 attack=backdoor attack.target=10"
    experiment = Experiment(make_algorithm("fedavg"), clients=4, rounds=1, devices=devices)
    with pytest.raises(ConfigError, match="there is no class 10: classes are 0 to 9"):
        fedcog.run(experiment, tmp_path / "classes")
    vectors = fedcog.from_arrays(
        torch.randn(40, 5), torch.arange(40) % 4, torch.randn(8, 5), torch.arange(8) % 4
    )
    devices = "attacker: clients=4 attack=backdoor"
    experiment = Experiment(clients=4, rounds=1, model="mlp", devices=devices)
    with pytest.raises(ConfigError, match="a trigger needs images"):
        fedcog.run(experiment, tmp_path / "vectors", data=vectors)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("attack.source=0", "are both 0, which flips nothing"),
        ("attack.target=3", "attack.target needs attack.source"),
    ],
)
def test_label_flips_that_would_flip_nothing_are_refused(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Experiment(clients=4, devices=f"attacker: clients=4 attack=label-flip {words}")


@pytest.mark.parametrize("algorithm", [Krum(attackers=1), MultiKrum(keep=5), TrimmedMean(trim=2)])
def test_rules_for_more_clients_than_there_are_are_refused(algorithm: Algorithm) -> None:
    with pytest.raises(ConfigError, match="needs at least 5 clients in a round, not 4"):
        Experiment(algorithm=algorithm, clients=4)


@pytest.mark.parametrize("algorithm", [Krum(attackers=1), MultiKrum(), TrimmedMean(trim=2)])
def test_rules_go_on_if_few_clients_answer(algorithm: RobustRule) -> None:
    updates = {"delta": {"x": torch.tensor([[1.0], [3.0]])}, "buffers": {}}
    total = algorithm.combine(updates, torch.ones(2))["delta"]["x"]
    assert float(total) / 2 in (1.0, 2.0, 3.0)


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("algorithm", [Median(), TrimmedMean(), Krum(), GeometricMedian()])
def test_divergence_is_named_as_such(algorithm: Algorithm, mapping: Any) -> None:
    toy = ToyFederation(algorithm, mapping, sizes=SIZES, rounds=1, lr=1e300)
    with pytest.raises(Diverged, match="updates of clients 0, 1, 2, 3, 4 are not finite"):
        toy.run()


def test_one_huge_update_does_not_make_the_geometric_median_nan() -> None:
    """Its square is infinite in float32. With enough passes it does not count."""
    values = [1.0, 2.0, 3.0, 1e25]
    algorithm = GeometricMedian(passes=80)
    payloads = []
    for value in values:
        update = {"x": torch.tensor([value, 0.0])}
        closeness = 1 / algorithm._length(update)
        parts = {"weight": torch.tensor(1.0), "median_weight": torch.tensor(1.0)}
        payloads.append({"delta": update, "buffers": {}, "closeness": closeness} | parts)
    total = add_totals(payloads)
    for _ in range(algorithm.num_resums):
        broadcast = algorithm.resum_broadcast(total)
        parts_of = [algorithm.resum_payload(payload, broadcast) for payload in payloads]
        total = total | add_totals(parts_of)
        payloads = [last | part for last, part in zip(payloads, parts_of, strict=True)]
    mean = algorithm.aggregate(total)["delta"]["x"] / total["weight"]
    assert mean.isfinite().all() and 1 <= float(mean[0]) <= 4
