import pytest
import torch

from fedcog.algorithms import FedAvg
from fedcog.experiments.config import Experiment
from fedcog.experiments.prepare import selection
from fedcog.federation.rounds import Schedule
from fedcog.federation.selection import Uniform
from fedcog.task import SingleLabel
from fedcog.testing import Small, worst


def test_sampling_is_a_function_of_seed_and_round() -> None:
    one = [Uniform(20, 6, seed=0).candidates(round) for round in range(50)]
    assert one == [Uniform(20, 6, seed=0).candidates(round) for round in range(50)]
    assert one != [Uniform(20, 6, seed=1).candidates(round) for round in range(50)]
    assert all(len(set(chosen)) == 6 and chosen == sorted(chosen) for chosen in one)
    assert {client for chosen in one for client in chosen} == set(range(20))


@pytest.mark.parametrize(("clients", "share", "expected"), [(10, 1.0, 10), (10, 0.25, 3), (10, 0.01, 1), (3, 0.5, 2)])
def test_how_many_take_part(clients: int, share: float, expected: int) -> None:
    chosen = selection(Experiment(clients=clients, participation=share), [10] * clients)
    assert len(chosen.candidates(0)) == expected


def test_the_last_round_is_always_evaluated() -> None:
    schedule = Schedule(10, Uniform(20, 6, seed=0), 0.1, 1.0, 4, True)
    assert [round + 1 for round in range(10) if schedule.evaluates(round)] == [4, 8, 10]


def test_the_learning_rate_decays_from_round_to_round() -> None:
    rates = []
    small = Small(FedAvg(), rounds=3)
    small.schedule = Schedule(3, Uniform(3, 3, seed=3), 0.4, 0.5, 1, False)
    gather = small.backend.gather
    small.backend.gather = lambda a, s, c, r, lr, b: (rates.append(lr), gather(a, s, c, r, lr, b))[1]  # type: ignore[method-assign, assignment, func-returns-value]
    small.run()
    assert rates == pytest.approx([0.4, 0.2, 0.1])


def test_accuracies_by_pencil() -> None:
    hits, totals = torch.tensor([4, 0, 3]), torch.tensor([5, 5, 10])
    task = SingleLabel(3)
    assert task.score(hits, totals) == 7 / 20
    assert task.score(hits, totals, torch.tensor([1, 0, 1])) == pytest.approx(3.5 / 7.5)
    assert task.score(hits, totals, torch.tensor([0, 8, 0])) == 0


def test_the_line_of_a_round() -> None:
    small = Small(FedAvg(), rounds=2)
    first, second = (done.line for done in small.run())
    assert (first["round"], second["round"]) == (1, 2)
    assert first["clients"] == [0, 1, 2]
    local = second["local"][1]
    scores = {"accuracy", "own_accuracy", "own_accuracy_before", "absent_accuracy", "absent_accuracy_before"}
    assert local.keys() == {"client", "loss", "distance", "down", "up", *scores}
    size = sum(value.nbytes for value in small.model.params.values())
    assert (local["down"], local["up"]) == (size, size + 16)  # in float64; up: also its weight, and that it is one
    assert second["seconds"].keys() == {"generation", "training", "evaluation", "total"}
    counts, before = small.backend.counts[1], None
    fresh = Small(FedAvg(), rounds=1)
    before = fresh.hits(fresh.run()[-1].server)["test"]
    assert local["own_accuracy_before"] == small.task.score(before, small.backend.totals, counts)
    lacking = counts == 0
    assert lacking.any() and not lacking.all()
    share = float(before[lacking].sum() / small.backend.totals[lacking].sum())
    assert local["absent_accuracy_before"] == pytest.approx(share)
    weights = small.backend.weights
    mean = sum(float(weights[one["client"]]) * one["loss"] for one in second["local"]) / float(weights.sum())
    assert second["loss"] == pytest.approx(mean, rel=1e-6)


def test_the_accuracy_is_that_of_a_plain_loop() -> None:
    small = Small(FedAvg(), rounds=1)
    server = small.run()[-1].server
    right = 0
    for x, y in zip(small.dataset.test_x, small.dataset.test_y, strict=True):
        inputs = (x.double() / 255 - small.data._mean) / small.data._std
        right += int(small.model.predict(server["params"], inputs[None]).argmax()) == int(y)
    assert small.hits(server)["test"].sum() == right


def test_weights_are_capped() -> None:
    small = Small(FedAvg())
    from fedcog.federation.simulation import Simulation

    capped = Simulation(small.backend.cohort, local_steps=1, local_epochs=0, weight_cap=20)
    assert capped.weights.tolist() == [1.0, 1.0, 0.5]
    assert small.backend.weights.tolist() == pytest.approx([1.0, 0.6, 0.2])


def test_who_takes_part_changes_only_who_is_summed() -> None:
    """A round of clients 0 and 2 is the weighted mean of their two separate rounds."""
    small = Small(FedAvg())
    shared = small.algorithm.broadcast(small.server)
    both = small.algorithm.server_update(
        small.server, small.backend.gather(small.algorithm, shared, [0, 2], 0, 0.05, None)[0], {}
    )
    singles = [
        small.algorithm.server_update(
            small.server, small.backend.gather(small.algorithm, shared, [client], 0, 0.05, None)[0], {}
        )["params"]
        for client in (0, 2)
    ]
    mean = {name: (50 * singles[0][name] + 10 * singles[1][name]) / 60 for name in singles[0]}
    assert worst(both["params"], mean) < 1e-12
