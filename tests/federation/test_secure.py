"""Secure aggregation and hostile answers, in Flower's simulation engine: what the server's grid receives is watched.

Masked rounds and clients that drop out are Ray's; the rest has its nodes in this process, for what goes wrong there
does so at the server, on the way to them.
"""
# ruff: noqa: E402

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import engine
from tests.engine import in_this_process  # noqa: F401 - a fixture

flower = pytest.importorskip("fedcog.federation.flower")
engine.needed()

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.constant import ErrorCode

import fedcog
from fedcog import tree
from fedcog.cli import main
from fedcog.experiments.config import Experiment, make_algorithm
from fedcog.experiments.prepare import Prepared
from fedcog.experiments.record import RunDirectory
from fedcog.federation import masking
from fedcog.federation.payloads import Unfit
from fedcog.tree import Params, State

SMALL = {"clients": 4, "local_steps": 3, "batch_size": 8, "mapping": "loop", "threads": 1, "device": "cpu"}
SMALL |= {"evaluate_local": False}
STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]
Ledger = flower.Ledger


def experiment(name: str, **own: Any) -> Experiment:
    tables = {"fedcog": {"start_round": 0, "count": 6, "steps": 2}}
    return Experiment(algorithm=make_algorithm(name, tables), **(SMALL | own))


def server(path: Path) -> Params:
    return tree.flatten(RunDirectory(path).load().server)  # type: ignore[union-attr]


def answers(one: Experiment) -> dict[int, Any]:
    """What each client would send in the first round, in clear."""
    prepared = Prepared(replace(one, secure_aggregation=False, workers=1))
    algorithm, backend = one.algorithm, prepared.backend
    shared = algorithm.broadcast(prepared.server)
    own = algorithm.client_init(shared)
    return {k: backend.alone(algorithm, shared, k, own, 0, one.lr, False)[0] for k in range(one.clients)}


def everything(content: RecordDict) -> list[np.ndarray]:
    """Every array of numbers in a message, wherever it stands."""
    found = []
    for record in content.values():
        for value in record.values():
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, Array):
                    found.append(part.numpy())
                elif isinstance(part, bytes):
                    if part.startswith(b"\x93NUMPY"):
                        found.append(bytes_to_ndarray(part))
                    else:
                        found.append(np.frombuffer(part, np.uint8))
                elif isinstance(part, int | float):
                    found.append(np.array([part]))
    return found


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other) + 1e-300))


def test_the_server_sees_the_sum_and_nothing_that_resembles_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[RecordDict] = []

    class Watching(Ledger):  # type: ignore[misc, valid-type]
        def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
            replies = super().send_and_receive(messages, timeout=timeout)
            received.extend(reply.content for reply in replies)
            return list(replies)

    monkeypatch.setattr(flower, "Ledger", Watching)
    one = experiment("scaffold+fedcog", rounds=1, secure_aggregation=True)
    masked = fedcog.run(one, tmp_path / "masked", report=False)
    plain = fedcog.run(replace(one, secure_aggregation=False), tmp_path / "plain", report=False)
    for name, value in server(plain.path).items():
        torch.testing.assert_close(value, server(masked.path)[name], atol=1e-3, rtol=0)
    assert masked.lines[0]["loss"] == pytest.approx(plain.lines[0]["loss"], abs=1e-3)

    assert len(received) == 4 * 4  # four clients, four stages
    secrets = []
    for client in answers(one).values():
        loss = client.loss[0] * client.total["weight"]
        secrets.append(masking.vector(client.total, loss, one.algorithm.scales, 1.0).numpy())
    size, seen = len(secrets[0]), 0
    for content in received:
        for name, record in content.items():
            if isinstance(record, MetricRecord):  # how many examples, which Flower sends in clear: always one
                assert dict(record) == {"num_examples": 1}, name
        for array in everything(content):
            numbers = array.astype(np.float64).ravel()
            if len(numbers) < size:
                assert array.dtype == np.uint8 or array.size == 1  # keys, shares of them, and numbers of nodes
                continue
            seen += 1
            assert len(numbers) == size
            for secret in secrets:
                assert abs(cosine(numbers - numbers.mean(), secret)) < 0.1
                assert abs(cosine(numbers, secret)) < 0.1
    assert seen == 4
    assert cosine(secrets[0], secrets[1]) > 0.1  # the measure does tell: two clients' updates resemble each other
    told = RunDirectory(masked.path).lines()[0]
    assert all(client.keys() == {"client", "down", "up"} for client in told["local"])


def test_a_round_survives_who_drops_out_and_says_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In round r one client falls silent from stage r on; in the fifth, two of four do."""
    calls = 0
    lost: list[int] = []

    class Losing(Ledger):  # type: ignore[misc, valid-type]
        def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
            nonlocal calls
            sent, round, stage = sorted(messages, key=lambda one: one.metadata.dst_node_id), calls // 4, calls % 4
            calls += 1
            if stage == 0:
                lost[:] = [one.metadata.dst_node_id for one in sent[: 2 if round == 4 else 1]]
            if stage >= min(round, 2 if round == 4 else 3):
                sent = [one for one in sent if one.metadata.dst_node_id not in lost]
            return list(super().send_and_receive(sent, timeout=timeout))

    monkeypatch.setattr(flower, "Ledger", Losing)
    one = experiment("fedavg", rounds=5, secure_aggregation=True)
    with (
        pytest.warns(UserWarning, match="goes on without client"),
        pytest.raises(RuntimeError, match="of 4 clients 3 must stay to its end"),
    ):
        fedcog.run(one, tmp_path / "run", report=False)
    lines = RunDirectory(tmp_path / "run").lines()
    assert [len(line["local"]) for line in lines] == [3, 3, 3, 4]  # who drops out last has been heard already
    assert [[gone["why"] for gone in line.get("refused", ())] for line in lines] == [
        *[["it did not answer in time."]] * 3,
        [],
    ]
    prepared = Prepared(replace(one, secure_aggregation=False, workers=1))
    algorithm, state = one.algorithm, prepared.server
    for line in lines:
        heard = [client["client"] for client in line["local"]]
        shared = algorithm.broadcast(state)
        gathered = prepared.backend.gather(algorithm, shared, heard, line["round"] - 1, one.lr, None)
        state = algorithm.server_update(state, gathered.total, {})
    for name, value in tree.flatten(state).items():
        torch.testing.assert_close(value, server(tmp_path / "run")[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--algorithm", "fedgen"], "uplink is a sum"),
        (["--selection", "power-of-choice"], "set --selection uniform"),
        (["--clients", "2"], "Set --clients or --participation"),
    ],
)
def test_what_is_no_sum_is_refused(words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--secure-aggregation", *words, "--rounds", "1"]) == 2
    assert remedy in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("in_this_process")
def test_masked_and_private_at_once(tmp_path: Path) -> None:
    one = experiment("scaffold", rounds=2, privacy="central", dp_clip=0.5, dp_noise=0.1)
    pytest.importorskip("dp_accounting")
    here = fedcog.run(one, tmp_path / "here", report=False)
    there = fedcog.run(replace(one, secure_aggregation=True), tmp_path / "there", report=False)
    for name, value in server(here.path).items():
        torch.testing.assert_close(value, server(there.path)[name], atol=1e-3, rtol=0)
    assert there.lines[-1]["privacy"] == here.lines[-1]["privacy"]
    assert there.lines[-1]["loss"] is None  # which nobody was told


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("secure", [False, True])
def test_nodes_that_are_all_away_for_a_moment_are_asked_again(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 Flower says at once, of every node, that it is not to be reached."""
    calls = 0

    class Away(Ledger):  # type: ignore[misc, valid-type]
        def __init__(self, grid: Any) -> None:
            super().__init__(SimpleNamespace(get_node_ids=grid.get_node_ids, send_and_receive=self._unreached))
            self._real = grid

        def _unreached(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
            nonlocal calls
            calls += 1
            if calls == (5 if secure else 2):
                lost = Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable")
                return [Message(lost, reply_to=message) for message in messages]
            return list(self._real.send_and_receive(messages, timeout=timeout))

    one = experiment("scaffold", rounds=2, backend="flower", secure_aggregation=secure)
    plain = fedcog.run(experiment("scaffold", rounds=2), tmp_path / "plain", report=False)
    monkeypatch.setattr(flower, "Ledger", Away)
    with pytest.warns(UserWarning, match="in round 2 .*They are waited for"):
        run = fedcog.run(one, tmp_path / "run", report=False)
    assert [len(line["local"]) for line in run.lines] == [4, 4]
    for name, value in server(plain.path).items():
        torch.testing.assert_close(value, server(run.path)[name], atol=1e-3 if secure else 1e-6, rtol=0)


@pytest.mark.usefixtures("in_this_process")
def test_a_number_out_of_range_drops_its_client_and_is_never_clipped(tmp_path: Path) -> None:
    one = experiment("fedavg", rounds=1, secure_aggregation=True, secure_scale=1e-4)
    with pytest.raises(RuntimeError, match=r"came to no sum.*raise --secure-scale"):
        fedcog.run(one, tmp_path / "run", report=False)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.usefixtures("in_this_process")
def test_a_round_goes_on_without_answers_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round another client sends something else: NaN, another shape, far too much, and a pickle."""

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))  # type: ignore[return-value]

    def spoil(found: ArrayRecord, round: int) -> None:
        name = next(key for key in found if key.startswith("total::delta"))
        good = found[name].numpy()
        if round == 0:
            found[name] = Array(np.full_like(good, np.nan))
        elif round == 1:
            found[name] = Array(good.ravel()[:-1].copy())
        elif round == 2:
            found["more"] = Array(np.zeros(10**6))
        else:
            data = npy(np.array([Bomb()], dtype=object))
            assert pickle.dumps(Bomb()) and b"exploded" in data
            found[name] = Array(dtype="float32", shape=good.shape, stype="numpy.ndarray", data=data)

    rounds = 0

    class Spoiling(Ledger):  # type: ignore[misc, valid-type]
        def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
            nonlocal rounds
            replies = sorted(
                super().send_and_receive(messages, timeout=timeout), key=lambda one: one.metadata.src_node_id
            )
            spoil(replies[rounds % len(replies)].content["found"], rounds)
            rounds += 1
            return replies

    monkeypatch.setattr(flower, "Ledger", Spoiling)
    one = experiment("fedavg", rounds=4, backend="flower")
    with pytest.warns(UserWarning, match="goes on without client"):
        run = fedcog.run(one, tmp_path / "run", report=True)
    reasons = [[gone["why"] for gone in line["refused"]] for line in run.lines]
    assert [len(why) for why in reasons] == [1, 1, 1, 1]
    for (why,), words in zip(
        reasons, ["not finite", "and not torch.float32", "bytes, and not", "are not taken"], strict=True
    ):
        assert words in why
    assert all(len(line["local"]) == 3 for line in run.lines)
    assert not (tmp_path / "exploded").exists()
    assert "4 times a round went on without a client" in (run.path / "report.html").read_text()


FORM: State = {
    "total": {"delta": {"w": torch.empty(2, 3), "b": torch.empty(3)}, "weight": torch.empty(())},
    "loss": torch.empty(1),
    "hits": torch.empty(1, 2, dtype=torch.int64),
}


def good() -> dict[str, np.ndarray]:
    return {
        name: np.ones(value.shape, str(value.dtype).removeprefix("torch."))
        for name, value in tree.flatten(FORM).items()
    }


names = st.sampled_from([*good(), "total", "total::delta", "", "::", "other", "total::delta::w::x"])
kinds = ["float32", "float64", "int64", "int8", "bool", "complex64", "U3", "S2", "O", ">f4", "float16", "M8[s]"]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def _odd_array(shape: tuple[int, ...], kind: str, value: float, order: str) -> bytes:
    with np.errstate(all="ignore"):
        return npy(np.full(shape, value).astype(kind, order=order))  # type: ignore[call-overload]


odd_arrays = st.builds(
    _odd_array, shapes, st.sampled_from(kinds[:8] + kinds[9:11]), st.sampled_from([0.0, 1.0]), st.sampled_from("CF")
)
not_finite = st.sampled_from([np.nan, np.inf, -np.inf]).map(lambda odd: npy(np.full((2, 3), odd, np.float32)))
header = st.sampled_from(
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3), }",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        b"{'descr': '<f4', 'shape': (2, 3)}",
        b"{'descr': __import__('os').abort(), 'fortran_order': False, 'shape': (1,), }",
        b"(" * 500,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1, " * 70 + b"), }\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 999999999999, 999999999999), }\n",
        b"",
    ]
).map(lambda text: b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
cut = st.integers(0, 150).map(lambda size: npy(np.ones((2, 3), np.float32))[:size])
pickled = st.just(pickle.dumps({"a": 1}))
datas = st.one_of(odd_arrays, not_finite, header, cut, pickled, st.binary(max_size=200))


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(names, datas, min_size=1, max_size=4),
    st.sets(st.sampled_from(list(good())), max_size=2),
    st.booleans(),
)
def test_of_a_thousand_strange_answers_each_is_taken_or_refused(
    strange: dict[str, bytes], missing: set[str], score: bool
) -> None:
    arrays = {name: npy(value) for name, value in good().items() if name not in missing} | strange
    record = ArrayRecord({name: Array("", (), "numpy.ndarray", data) for name, data in arrays.items()})
    try:
        found = flower.told(record, FORM, score)
    except Unfit:
        return
    wanted = FORM if score else {name: part for name, part in FORM.items() if name != "hits"}
    flat = tree.flatten(found)
    assert list(flat) == list(tree.flatten(wanted))
    for name, like in tree.flatten(wanted).items():
        assert flat[name].shape == like.shape and flat[name].dtype == like.dtype
        assert bool(flat[name].isfinite().all())


@pytest.mark.parametrize("found", [None, ConfigRecord({"a": 1}), "text", 3])
def test_what_is_no_arrays_is_refused(found: Any) -> None:
    with pytest.raises(Unfit, match="no arrays"):
        flower.told(found, FORM, True)


def test_good_answers_are_taken() -> None:
    record = ArrayRecord({name: Array(value) for name, value in good().items()})
    assert tree.flatten(flower.told(record, FORM, True)).keys() == good().keys()
