"""Where memory is short: clients in parts, states and data in host memory, and the same results."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedcog import Experiment, run, tree
from fedcog.algorithms import Algorithm, FedAvg, FedCOG, FedProx
from fedcog.data import FederatedData, federated
from fedcog.federation import graphs
from fedcog.federation.cohort import Cohort
from fedcog.federation.store import Store
from fedcog.testing import Small, images, worst

COG = FedCOG(FedProx(mu=0.1), count=8, steps=3, start_round=1, lr=0.1)
SIZES = (40, 25, 15, 10, 8)


def small(algorithm: Algorithm = COG, **settings: object) -> Small:
    return Small(algorithm, "vmap", dataset=images(120), sizes=SIZES, epochs=0.5, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_parts_of_a_cohort_come_to_the_whole(limit: int) -> None:
    whole, parts = small(), small()
    parts.backend.cohort.limit = limit
    line, other = (one.run()[-1].line for one in (whole, parts))
    servers = [tree.flatten(one.server) for one in (whole, parts)]
    assert worst(*servers) < 1e-9
    assert worst(whole.backend.store.flatten(), parts.backend.store.flatten()) < 1e-9
    for key in ("loss", "accuracy", "personal_accuracy"):
        assert line[key] == pytest.approx(other[key], rel=1e-9)
    for mine, theirs in zip(line["local"], other["local"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(("count", "limit", "sizes"), [(10, 4, [4, 4, 2]), (5, 5, [5]), (7, 3, [3, 3, 1]), (1, 9, [1])])
def test_parts_are_as_even_as_can_be(count: int, limit: int, sizes: list[int]) -> None:
    cohort = small().backend.cohort
    cohort.limit = limit
    assert [part.stop - part.start for part in cohort.parts(count)] == sizes


def test_memory_that_runs_out_halves_the_parts() -> None:
    plain, short = small(FedAvg()), small(FedAvg())
    train, tried = short.backend.cohort.train, []

    def narrow(algorithm, shared, members, *rest, **named):  # type: ignore[no-untyped-def]
        tried.append(len(members.number))
        if len(members.number) > 2:
            raise torch.cuda.OutOfMemoryError("none left")
        return train(algorithm, shared, members, *rest, **named)

    short.backend.cohort.train = narrow  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="memory ran out: from now on 3 clients"):
        ended = short.everything()
    assert worst(plain.everything(), ended) < 1e-9
    assert tried[0] == 5 and tried[1] == 3 and set(tried[2:]) == {2, 1}


def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[Store]]:
    """A device without room in round 2 until clients' states leave it: how many were to train, which stores left it."""
    tried, left = list[int](), list[Store]()
    train, really = Cohort._train_parties, Store.retreat

    def narrow(self: Cohort, algorithm: Algorithm, parties: Any, round: int, *rest: Any) -> Any:
        tried.append(sum(len(party.members.number) for party in parties))
        if round == 1 and not left:
            raise torch.cuda.OutOfMemoryError("none left")
        return train(self, algorithm, parties, round, *rest)

    def retreat(self: Store) -> bool:
        assert not really(self) and self._kept  # all are in host memory here
        left.append(self)
        return True

    monkeypatch.setattr(Cohort, "_train_parties", narrow)
    monkeypatch.setattr(Store, "retreat", retreat)
    return tried, left


def test_states_leave_the_device_before_fewer_clients_train_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small().everything()
    tried, left = short_of_memory(monkeypatch)
    short = small()
    assert worst(plain, short.everything()) < 1e-9
    assert tried == [5, 5, 5] and left == [short.backend.store]  # round 1, round 2 in vain, and again


def test_memory_that_does_not_suffice_for_one_client_is_said() -> None:
    short = small(FedAvg())

    def never(*given, **named):  # type: ignore[no-untyped-def]
        raise torch.cuda.OutOfMemoryError("none left")

    short.backend.cohort.train = never  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="memory ran out"), pytest.raises(torch.cuda.OutOfMemoryError):
        short.run()


@pytest.mark.parametrize("mapping", ["loop", "vmap"])
@pytest.mark.parametrize("epochs", [0.0, 1.0])
def test_streamed_data_is_the_same_data(mapping: str, epochs: float) -> None:
    settings = {"dataset": images(300), "sizes": (200, 60, 40), "steps": 40, "epochs": epochs}
    held, streamed = (Small(COG, mapping, **settings) for _ in range(2))  # type: ignore[arg-type]
    data, given = streamed.data, streamed.dataset
    parts = [data.own(client) for client in range(3)]
    streamed.backend.cohort.data = FederatedData(given, parts, seed=3, augment=True, dtype=torch.float64, room=1000)
    assert streamed.backend.cohort.data.streamed and not data.streamed
    assert worst(held.everything(), streamed.everything()) < 1e-9


def test_states_are_kept_one_by_one_but_for_those_that_are_not_sound() -> None:
    store = Store(torch.device("cpu"), room=2 * 4 * 10)
    kept = {"previous": torch.arange(40.0).reshape(4, 10)}
    store.put([0, 1, 2, 3], store.rows([0, 1, 2, 3], kept), [True, True, False, True])
    taken = store.take([3, 0], dict)
    assert torch.equal(taken["previous"], kept["previous"][[3, 0]])
    assert set(store.flatten()) == {"0::previous", "1::previous", "3::previous"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_keeps_few_states_and_the_host_the_others() -> None:
    store = Store(torch.device("cuda"), room=2 * 4 * 10)
    kept = {"previous": torch.arange(40.0, device="cuda").reshape(4, 10)}
    store.put(range(4), store.rows(range(4), kept), [True] * 4)
    assert [value.device.type for value in store.flatten().values()] == ["cuda", "cuda", "cpu", "cpu"]
    assert torch.equal(store.take([3, 0], dict)["previous"], kept["previous"][[3, 0]])
    with pytest.warns(UserWarning, match="memory ran out"):
        assert store.retreat()
    assert {value.device.type for value in store.flatten().values()} == {"cpu"} and not store.retreat()
    assert [one["previous"].device.type for one in store.rows([0, 1], store.take([0, 1], dict))] == ["cpu", "cpu"]
    store.restore({name: value.cpu() for name, value in store.flatten().items()})
    assert {value.device.type for value in store.flatten().values()} == {"cpu"}  # nobody has asked for them yet
    assert torch.equal(store.take([3, 0], dict)["previous"], kept["previous"][[3, 0]])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_streams_data_that_it_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "fused", lambda layout: layout.write)  # captured all the same, and much sooner
    experiment = Experiment(algorithm=COG, rounds=3, clients=4, local_steps=40, batch_size=8, device="cuda", lr=0.05)
    held = run(experiment, tmp_path / "held", report=False)
    monkeypatch.setattr(federated, "_room", lambda device: 1000)
    streamed = run(experiment, tmp_path / "streamed", report=False)
    for one, other in zip(held.lines, streamed.lines, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
