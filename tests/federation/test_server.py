"""Tests of the server loop: client sampling, schedule, records, scores and weights."""

import pytest
import torch

from fedcog.algorithms import FedAvg
from fedcog.core.lr_schedules import LRSchedule
from fedcog.core.tasks import SingleLabel
from fedcog.core.tree import Params
from fedcog.federation.backend import RoundRequest, RoundResult
from fedcog.federation.client_sampling import Uniform
from fedcog.federation.server import Schedule
from fedcog.federation.simulator import LocalWorkload, Simulator
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.setup import make_sampling
from fedcog.testing import ToyFederation, max_difference


def test_sampling_is_a_function_of_seed_and_round() -> None:
    rounds = [Uniform(20, 6, seed=0).candidates(round) for round in range(50)]
    assert rounds == [Uniform(20, 6, seed=0).candidates(round) for round in range(50)]
    assert rounds != [Uniform(20, 6, seed=1).candidates(round) for round in range(50)]
    assert all(len(set(chosen)) == 6 and chosen == sorted(chosen) for chosen in rounds)
    assert {client for chosen in rounds for client in chosen} == set(range(20))


@pytest.mark.parametrize(
    ("clients", "participation", "expected"),
    [(10, 1.0, 10), (10, 0.25, 3), (10, 0.01, 1), (3, 0.5, 2)],
)
def test_participation_rounds_to_at_least_one_client(
    clients: int, participation: float, expected: int
) -> None:
    sampling = make_sampling(
        Experiment(clients=clients, participation=participation), [10] * clients
    )
    assert len(sampling.candidates(0)) == expected


def test_last_round_is_always_evaluated() -> None:
    schedule = Schedule(10, Uniform(20, 6, seed=0), 0.1, 1.0, 4, True)
    assert [round + 1 for round in range(10) if schedule.is_evaluated(round)] == [4, 8, 10]


def test_learning_rate_decays_every_round() -> None:
    rates = []
    toy = ToyFederation(FedAvg(), rounds=3)
    toy.server.schedule = Schedule(3, Uniform(3, 3, seed=3), 0.4, LRSchedule(decay=0.5), 1, False)
    run_round = toy.simulator.run_round

    def recording(request: RoundRequest) -> RoundResult:
        rates.append(request.lr)
        return run_round(request)

    toy.simulator.run_round = recording  # type: ignore[method-assign]
    toy.run()
    assert rates == pytest.approx([0.4, 0.2, 0.1])


def test_accuracies_computed_by_hand() -> None:
    hits = torch.tensor([4, 0, 3])
    totals = torch.tensor([5, 5, 10])
    task = SingleLabel(3)
    assert task.score(hits, totals) == 7 / 20
    assert task.score(hits, totals, torch.tensor([1, 0, 1])) == pytest.approx(3.5 / 7.5)
    assert task.score(hits, totals, torch.tensor([0, 8, 0])) == 0


def test_round_record_holds_the_documented_values() -> None:
    toy = ToyFederation(FedAvg(), rounds=2)
    first, second = [result.record.to_line() for result in toy.run()]
    assert (first["round"], second["round"]) == (1, 2)
    assert first["clients"] == [0, 1, 2]
    local = second["local"][1]
    scores = {
        "accuracy",
        "own_accuracy",
        "own_accuracy_before",
        "absent_accuracy",
        "absent_accuracy_before",
    }
    assert local.keys() == {"client", "loss", "distance", "down", "up", *scores}
    size = sum(value.nbytes for value in toy.model.params.values())
    # The client also sends its weight and the count 1, each a float64.
    assert (local["down"], local["up"]) == (size, size + 16)
    assert second["seconds"].keys() == {"generation", "training", "evaluation", "total"}
    counts = toy.simulator.class_counts[1]
    test_counts = toy.simulator.test_class_counts
    fresh = ToyFederation(FedAvg(), rounds=1)
    before = fresh.server.scorer.class_stats(fresh.run()[-1].server)["test"]
    assert local["own_accuracy_before"] == toy.task.score(before, test_counts, counts)
    absent = counts == 0
    assert absent.any() and not absent.all()
    expected = float(before[absent].sum() / test_counts[absent].sum())
    assert local["absent_accuracy_before"] == pytest.approx(expected)
    weights = toy.simulator.weights
    total_loss = sum(float(weights[local["client"]]) * local["loss"] for local in second["local"])
    assert second["loss"] == pytest.approx(total_loss / float(weights.sum()), rel=1e-6)


def test_accuracy_matches_a_plain_loop() -> None:
    toy = ToyFederation(FedAvg(), rounds=1)
    server = toy.run()[-1].server
    num_correct = 0
    for x, y in zip(toy.dataset.test_x, toy.dataset.test_y, strict=True):
        inputs = (x.double() / 255 - toy.data._mean) / toy.data._std
        num_correct += int(toy.model.predict(server["params"], inputs[None]).argmax()) == int(y)
    assert toy.server.scorer.class_stats(server)["test"].sum() == num_correct


def test_weights_are_capped() -> None:
    toy = ToyFederation(FedAvg())
    capped = Simulator(toy.simulator.cohort, LocalWorkload(local_steps=1, weight_cap=20))
    assert capped.weights.tolist() == [1.0, 1.0, 0.5]
    assert toy.simulator.weights.tolist() == pytest.approx([1.0, 0.6, 0.2])


def test_round_of_two_clients_is_the_mean_of_their_separate_rounds() -> None:
    """The mean is weighted by the clients' numbers of examples."""
    toy = ToyFederation(FedAvg())
    broadcast = toy.algorithm.broadcast(toy.server.state)

    def params_after(client_ids: list[int]) -> Params:
        total = toy.run_clients(client_ids, 0, broadcast).total
        params: Params = toy.algorithm.server_update(toy.server.state, total, {})["params"]
        return params

    both = params_after([0, 2])
    separate = [params_after([client]) for client in (0, 2)]
    mean = {name: (50 * separate[0][name] + 10 * separate[1][name]) / 60 for name in separate[0]}
    assert max_difference(both, mean) < 1e-12
