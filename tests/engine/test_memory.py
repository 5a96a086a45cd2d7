"""Where memory is short: clients in parts, states and data in host memory, and the same results."""

from pathlib import Path

import pytest
import torch

from fedcog import Experiment, run
from fedcog.algorithms import Algorithm, FedAvg, FedCOG, FedProx
from fedcog.core import tree
from fedcog.data import FederatedData, client_batches
from fedcog.engine import cuda_graphs
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.cohort_results import CohortResult
from fedcog.engine.local_training import CohortClients
from fedcog.federation.client_states import ClientStates
from fedcog.testing import ToyFederation, max_difference, random_images
from tests.support.engine_doubles import simulate_out_of_memory

COG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)
SIZES = (40, 25, 15, 10, 8)


def toy(algorithm: Algorithm = COG, **settings: object) -> ToyFederation:
    return ToyFederation(
        algorithm, "vmap", dataset=random_images(120), sizes=SIZES, epochs=0.5, **settings
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_parts_of_a_cohort_come_to_the_whole(limit: int) -> None:
    whole = toy()
    parts = toy()
    parts.simulator.cohort.max_clients = limit
    line, other = (one.run()[-1].record.to_line() for one in (whole, parts))
    servers = [tree.flatten(one.server.state) for one in (whole, parts)]
    assert max_difference(*servers) < 1e-9
    assert (
        max_difference(
            whole.simulator.client_states.flatten(), parts.simulator.client_states.flatten()
        )
        < 1e-9
    )
    for key in ("loss", "accuracy", "personal_accuracy"):
        assert line[key] == pytest.approx(other[key], rel=1e-9)
    for mine, theirs in zip(line["local"], other["local"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(
    ("count", "limit", "sizes"), [(10, 4, [4, 4, 2]), (5, 5, [5]), (7, 3, [3, 3, 1]), (1, 9, [1])]
)
def test_parts_are_as_even_as_can_be(count: int, limit: int, sizes: list[int]) -> None:
    cohort = toy().simulator.cohort
    cohort.max_clients = limit
    size = cohort.chunk_size(count)
    assert [min(size, count - start) for start in range(0, count, size)] == sizes


def test_memory_that_runs_out_halves_the_parts() -> None:
    plain = toy(FedAvg())
    short = toy(FedAvg())
    train = short.simulator.cohort.train
    tried = []

    def narrow(spec: RoundSpec, clients: CohortClients, stack_size: int = 0) -> CohortResult:
        tried.append(len(clients.client_ids))
        if len(clients.client_ids) > 2:
            raise torch.cuda.OutOfMemoryError("none left")
        return train(spec, clients, stack_size)

    short.simulator.cohort.train = narrow  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="out of memory: from now on at most 3 clients"):
        ended = short.final_state()
    assert max_difference(plain.final_state(), ended) < 1e-9
    assert tried[0] == 5 and tried[1] == 3 and set(tried[2:]) == {2, 1}


def test_states_leave_the_device_before_fewer_clients_train_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = toy().final_state()
    tried, left = simulate_out_of_memory(monkeypatch)
    short = toy()
    assert max_difference(plain, short.final_state()) < 1e-9
    assert tried == [5, 5, 5] and left == [
        short.simulator.client_states
    ]  # round 1, round 2 in vain, and again


def test_memory_that_does_not_suffice_for_one_client_is_said() -> None:
    short = toy(FedAvg())

    def never(*given, **named):  # type: ignore[no-untyped-def]
        raise torch.cuda.OutOfMemoryError("none left")

    short.simulator.cohort.train = never  # type: ignore[method-assign]
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(torch.cuda.OutOfMemoryError),
    ):
        short.run()


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("epochs", [0.0, 1.0])
def test_streamed_data_is_the_same_data(
    mapping: str, epochs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "dataset": random_images(300),
        "sizes": (200, 60, 40),
        "steps": 40,
        "epochs": epochs,
    }
    held, streamed = (ToyFederation(COG, mapping, **settings) for _ in range(2))  # type: ignore[arg-type]
    data = streamed.data
    given = streamed.dataset
    parts = [data.client_indices(client) for client in range(3)]
    monkeypatch.setattr(client_batches, "max_device_bytes", lambda device: 1000)
    cohort = streamed.simulator.cohort
    cohort.data = FederatedData(given, parts, seed=3, augment=True, dtype=torch.float64)
    cohort.evaluator = cohort.evaluator._replace(data=cohort.data)
    assert cohort.data.is_streamed and not data.is_streamed
    assert max_difference(held.final_state(), streamed.final_state()) < 1e-9


def test_states_are_kept_one_by_one_but_for_those_that_are_not_sound() -> None:
    store = ClientStates(torch.device("cpu"), max_bytes=2 * 4 * 10)
    kept = {"previous": torch.arange(40.0).reshape(4, 10)}
    store.put([0, 1, 2, 3], store.unstack([0, 1, 2, 3], kept), [True, True, False, True])
    taken = store.stacked([3, 0], dict)
    assert torch.equal(taken["previous"], kept["previous"][[3, 0]])
    assert set(store.flatten()) == {"0::previous", "1::previous", "3::previous"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_keeps_few_states_and_the_host_the_others() -> None:
    store = ClientStates(torch.device("cuda"), max_bytes=2 * 4 * 10)
    kept = {"previous": torch.arange(40.0, device="cuda").reshape(4, 10)}
    store.put(range(4), store.unstack(range(4), kept), [True] * 4)
    assert [value.device.type for value in store.flatten().values()] == [
        "cuda",
        "cuda",
        "cpu",
        "cpu",
    ]
    assert torch.equal(store.stacked([3, 0], dict)["previous"], kept["previous"][[3, 0]])
    with pytest.warns(UserWarning, match="out of memory"):
        assert store.move_to_host()
    assert {value.device.type for value in store.flatten().values()} == {
        "cpu"
    } and not store.move_to_host()
    assert [
        one["previous"].device.type for one in store.unstack([0, 1], store.stacked([0, 1], dict))
    ] == ["cpu", "cpu"]
    store.restore({name: value.cpu() for name, value in store.flatten().items()})
    assert {value.device.type for value in store.flatten().values()} == {
        "cpu"
    }  # nobody has asked for them yet
    assert torch.equal(store.stacked([3, 0], dict)["previous"], kept["previous"][[3, 0]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_streams_data_that_it_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda_graphs, "compile_step", lambda buffers: buffers.write_step
    )  # captured all the same, and much sooner
    experiment = Experiment(
        algorithm=COG, rounds=3, clients=4, local_steps=40, batch_size=8, device="cuda", lr=0.05
    )
    held = run(experiment, tmp_path / "held", report=False)
    monkeypatch.setattr(client_batches, "max_device_bytes", lambda device: 1000)
    streamed = run(experiment, tmp_path / "streamed", report=False)
    for one, other in zip(held.lines, streamed.lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
