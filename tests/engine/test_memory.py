"""Tests of training with little memory: chunks of clients, states and data in host memory."""

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

FEDCOG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)
SIZES = (40, 25, 15, 10, 8)


def make_toy(algorithm: Algorithm = FEDCOG, **settings: object) -> ToyFederation:
    return ToyFederation(
        algorithm, "vmap", dataset=random_images(120), sizes=SIZES, epochs=0.5, **settings
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_chunked_cohort_equals_full_cohort(limit: int) -> None:
    full = make_toy()
    chunked = make_toy()
    chunked.simulator.cohort.max_clients = limit
    full_line = full.run()[-1].record.to_line()
    chunked_line = chunked.run()[-1].record.to_line()
    server_states = [tree.flatten(toy.server.state) for toy in (full, chunked)]
    assert max_difference(*server_states) < 1e-9
    client_states = [toy.simulator.client_states.flatten() for toy in (full, chunked)]
    assert max_difference(*client_states) < 1e-9
    for key in ("loss", "accuracy", "label_mix_accuracy"):
        assert full_line[key] == pytest.approx(chunked_line[key], rel=1e-9)
    for expected, actual in zip(full_line["local"], chunked_line["local"], strict=True):
        assert expected == pytest.approx(actual, rel=1e-9)


@pytest.mark.parametrize(
    ("count", "limit", "sizes"), [(10, 4, [4, 4, 2]), (5, 5, [5]), (7, 3, [3, 3, 1]), (1, 9, [1])]
)
def test_chunks_are_as_even_as_possible(count: int, limit: int, sizes: list[int]) -> None:
    cohort = make_toy().simulator.cohort
    cohort.max_clients = limit
    size = cohort.chunk_size(count)
    assert [min(size, count - start) for start in range(0, count, size)] == sizes


def test_out_of_memory_halves_the_chunks() -> None:
    plain = make_toy(FedAvg())
    limited = make_toy(FedAvg())
    train = limited.simulator.cohort.train
    attempts = []

    def limited_train(spec: RoundSpec, clients: CohortClients, stack_size: int = 0) -> CohortResult:
        attempts.append(len(clients.client_ids))
        if len(clients.client_ids) > 2:
            raise torch.cuda.OutOfMemoryError("none left")
        return train(spec, clients, stack_size)

    limited.simulator.cohort.train = limited_train  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="out of memory: from now on at most 3 clients"):
        limited_state = limited.final_state()
    assert max_difference(plain.final_state(), limited_state) < 1e-9
    assert attempts[0] == 5 and attempts[1] == 3 and set(attempts[2:]) == {2, 1}


def test_states_move_to_host_before_chunks_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_state = make_toy().final_state()
    attempts, moved = simulate_out_of_memory(monkeypatch)
    limited = make_toy()
    assert max_difference(plain_state, limited.final_state()) < 1e-9
    # Round 1, a failed attempt at round 2, and round 2.
    assert attempts == [5, 5, 5]
    assert moved == [limited.simulator.client_states]


def test_too_little_memory_for_one_client_is_an_error() -> None:
    limited = make_toy(FedAvg())

    def fail(*args, **kwargs):  # type: ignore[no-untyped-def]
        raise torch.cuda.OutOfMemoryError("none left")

    limited.simulator.cohort.train = fail  # type: ignore[method-assign]
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(torch.cuda.OutOfMemoryError),
    ):
        limited.run()


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("epochs", [0.0, 1.0])
def test_streamed_data_gives_the_same_result(
    mapping: str, epochs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "dataset": random_images(300),
        "sizes": (200, 60, 40),
        "steps": 40,
        "epochs": epochs,
    }
    resident = ToyFederation(FEDCOG, mapping, **settings)  # type: ignore[arg-type]
    streamed = ToyFederation(FEDCOG, mapping, **settings)  # type: ignore[arg-type]
    data = streamed.data
    parts = [data.client_indices(client) for client in range(3)]
    monkeypatch.setattr(client_batches, "max_device_bytes", lambda device: 1000)
    cohort = streamed.simulator.cohort
    cohort.data = FederatedData(streamed.dataset, parts, seed=3, augment=True, dtype=torch.float64)
    cohort.evaluator = cohort.evaluator._replace(data=cohort.data)
    assert cohort.data.is_streamed and not data.is_streamed
    assert max_difference(resident.final_state(), streamed.final_state()) < 1e-9


def test_store_skips_states_that_are_not_finite() -> None:
    store = ClientStates(torch.device("cpu"), max_bytes=2 * 4 * 10)
    stacked = {"previous": torch.arange(40.0).reshape(4, 10)}
    store.put([0, 1, 2, 3], store.unstack([0, 1, 2, 3], stacked), [True, True, False, True])
    restacked = store.stacked([3, 0], dict)
    assert torch.equal(restacked["previous"], stacked["previous"][[3, 0]])
    assert set(store.flatten()) == {"0::previous", "1::previous", "3::previous"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_keeps_some_states_and_host_the_others() -> None:
    def device_types() -> list[str]:
        return [value.device.type for value in store.flatten().values()]

    store = ClientStates(torch.device("cuda"), max_bytes=2 * 4 * 10)
    stacked = {"previous": torch.arange(40.0, device="cuda").reshape(4, 10)}
    store.put(range(4), store.unstack(range(4), stacked), [True] * 4)
    assert device_types() == ["cuda", "cuda", "cpu", "cpu"]
    assert torch.equal(store.stacked([3, 0], dict)["previous"], stacked["previous"][[3, 0]])
    with pytest.warns(UserWarning, match="out of memory"):
        assert store.move_to_host()
    assert set(device_types()) == {"cpu"} and not store.move_to_host()
    unstacked = store.unstack([0, 1], store.stacked([0, 1], dict))
    assert [state["previous"].device.type for state in unstacked] == ["cpu", "cpu"]
    store.restore({name: value.cpu() for name, value in store.flatten().items()})
    assert set(device_types()) == {"cpu"}  # a restored state moves only when it is used
    assert torch.equal(store.stacked([3, 0], dict)["previous"], stacked["previous"][[3, 0]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_streams_data_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps are captured but not compiled, which takes much less time.
    monkeypatch.setattr(cuda_graphs, "compile_step", lambda buffers: buffers.write_step)
    experiment = Experiment(
        algorithm=FEDCOG, rounds=3, clients=4, local_steps=40, batch_size=8, device="cuda", lr=0.05
    )
    resident = run(experiment, tmp_path / "held", report=False)
    monkeypatch.setattr(client_batches, "max_device_bytes", lambda device: 1000)
    streamed = run(experiment, tmp_path / "streamed", report=False)
    for expected, actual in zip(resident.lines, streamed.lines, strict=True):
        assert expected["loss"] == pytest.approx(actual["loss"], rel=1e-5)
