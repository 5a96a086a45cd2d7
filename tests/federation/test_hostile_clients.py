"""Tests of secure aggregation and of malformed client answers on the Flower backend.

Two tests run masked rounds and dropouts in Ray. The others keep the nodes in this process, because
they fail at the server or in the messages.
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

from tests.support import flower_engine
from tests.support.flower_engine import in_process_flower  # noqa: F401 - a fixture

flower_server = pytest.importorskip("fedcog.federation.flower_server")
flower_engine.skip_without_ray()

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.constant import ErrorCode

import fedcog
from fedcog.cli.main import main
from fedcog.core import tree
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import InvalidPayload
from fedcog.engine.cohort import RoundSpec
from fedcog.federation import flower_messages, secure_aggregation
from fedcog.runs.config.composition import make_algorithm
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.runs.setup import ExperimentSetup

SMALL = {
    "clients": 4,
    "local_steps": 3,
    "batch_size": 8,
    "mapping": "loop",
    "threads": 1,
    "device": "cpu",
    "evaluate_local": False,
}
STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]
TrafficMeter = flower_server.TrafficMeter


def experiment(name: str, **settings: Any) -> Experiment:
    tables = {"fedcog": {"start_round": 0, "count": 6, "steps": 2}}
    return Experiment(algorithm=make_algorithm(name, tables), **(SMALL | settings))


def server_state(path: Path) -> Params:
    return tree.flatten(RunDirectory(path).load().server)  # type: ignore[union-attr]


def plain_answers(config: Experiment) -> dict[int, Any]:
    """Each client's unmasked answer in the first round."""
    setup = ExperimentSetup(replace(config, secure_aggregation=False, workers=1))
    algorithm = config.algorithm
    simulator = setup.simulator
    broadcast = algorithm.broadcast(setup.server_state)
    state = algorithm.client_init(broadcast)
    spec = RoundSpec(algorithm, broadcast, round=0, lr=config.lr, evaluate_local=False)
    return {k: simulator.train_client(spec, k, state)[0] for k in range(config.clients)}


def all_arrays(content: RecordDict) -> list[np.ndarray]:
    """Every array of numbers anywhere in a message."""
    arrays = []
    for record in content.values():
        for value in record.values():
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, Array):
                    arrays.append(part.numpy())
                elif isinstance(part, bytes):
                    if part.startswith(b"\x93NUMPY"):
                        arrays.append(bytes_to_ndarray(part))
                    else:
                        arrays.append(np.frombuffer(part, np.uint8))
                elif isinstance(part, int | float):
                    arrays.append(np.array([part]))
    return arrays


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b) + 1e-300))


@pytest.mark.ray
def test_server_receives_only_masked_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[RecordDict] = []

    class RecordingMeter(TrafficMeter):  # type: ignore[misc, valid-type]
        def send_and_receive(
            self, messages: Iterable[Any], *, timeout: float | None = None
        ) -> list[Any]:
            replies = super().send_and_receive(messages, timeout=timeout)
            received.extend(reply.content for reply in replies)
            return list(replies)

    monkeypatch.setattr(flower_server, "TrafficMeter", RecordingMeter)
    config = experiment("scaffold+fedcog", rounds=1, secure_aggregation=True)
    masked = fedcog.run(config, tmp_path / "masked", report=False)
    plain = fedcog.run(replace(config, secure_aggregation=False), tmp_path / "plain", report=False)
    for name, value in server_state(plain.path).items():
        torch.testing.assert_close(value, server_state(masked.path)[name], atol=1e-3, rtol=0)
    assert masked.lines[0]["loss"] == pytest.approx(plain.lines[0]["loss"], abs=1e-3)

    assert len(received) == 4 * 4  # four clients, four stages
    secrets = []
    bounds = config.algorithm.payload_bounds
    for answer in plain_answers(config).values():
        loss = answer.loss[0] * answer.total["weight"]
        vector = secure_aggregation.to_vector(answer.total, loss, bounds, 1.0)
        secrets.append(vector.numpy())
    size = len(secrets[0])
    num_vectors = 0
    for content in received:
        for name, record in content.items():
            # Flower sends the number of examples unmasked, so it must always be 1.
            if isinstance(record, MetricRecord):
                assert dict(record) == {"num_examples": 1}, name
        for array in all_arrays(content):
            numbers = array.astype(np.float64).ravel()
            if len(numbers) < size:
                # Keys, secret shares, and node ids.
                assert array.dtype == np.uint8 or array.size == 1
                continue
            num_vectors += 1
            assert len(numbers) == size
            for secret in secrets:
                assert abs(cosine(numbers - numbers.mean(), secret)) < 0.1
                assert abs(cosine(numbers, secret)) < 0.1
    assert num_vectors == 4
    # The measure does detect similarity: the updates of two clients are similar.
    assert cosine(secrets[0], secrets[1]) > 0.1
    line = RunDirectory(masked.path).lines()[0]
    assert all(client.keys() == {"client", "down", "up"} for client in line["local"])


@pytest.mark.ray
def test_masked_round_survives_dropouts_and_records_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round r one client drops out at stage r; in round 5 two of four clients do."""
    calls = 0
    dropped: list[int] = []

    class DroppingMeter(TrafficMeter):  # type: ignore[misc, valid-type]
        def send_and_receive(
            self, messages: Iterable[Any], *, timeout: float | None = None
        ) -> list[Any]:
            nonlocal calls
            remaining = sorted(messages, key=lambda message: message.metadata.dst_node_id)
            round = calls // 4
            stage = calls % 4
            calls += 1
            if stage == 0:
                num_dropped = 2 if round == 4 else 1
                dropped[:] = [message.metadata.dst_node_id for message in remaining[:num_dropped]]
            if stage >= min(round, 2 if round == 4 else 3):
                remaining = [
                    message for message in remaining if message.metadata.dst_node_id not in dropped
                ]
            return list(super().send_and_receive(remaining, timeout=timeout))

    monkeypatch.setattr(flower_server, "TrafficMeter", DroppingMeter)
    config = experiment("fedavg", rounds=5, secure_aggregation=True)
    with (
        pytest.warns(UserWarning, match="continues without client"),
        pytest.raises(RuntimeError, match="of 4 clients 3 must stay until its end"),
    ):
        fedcog.run(config, tmp_path / "run", report=False)
    lines = RunDirectory(tmp_path / "run").lines()
    # A client that drops out in the last stage has sent its vector before.
    assert [len(line["local"]) for line in lines] == [3, 3, 3, 4]
    reasons = [[client["why"] for client in line.get("refused", ())] for line in lines]
    assert reasons == [*[["it did not answer in time."]] * 3, []]
    setup = ExperimentSetup(replace(config, secure_aggregation=False, workers=1))
    algorithm = config.algorithm
    state = setup.server_state
    for line in lines:
        client_ids = [client["client"] for client in line["local"]]
        spec = RoundSpec(algorithm, algorithm.broadcast(state), line["round"] - 1, config.lr, False)
        result, _ = setup.simulator.train(spec, client_ids)
        state = algorithm.server_update(state, result.total, {})
    for name, value in tree.flatten(state).items():
        torch.testing.assert_close(value, server_state(tmp_path / "run")[name], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--algorithm", "fedgen"], "uplink is a sum"),
        (["--selection", "power-of-choice"], "set --selection uniform"),
        (["--clients", "2"], "Set --clients or --participation"),
    ],
)
def test_unsupported_settings_of_secure_aggregation_are_refused(
    flags: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--secure-aggregation", *flags, "--rounds", "1"]) == 2
    assert remedy in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
def test_secure_aggregation_with_central_privacy_matches_plain(tmp_path: Path) -> None:
    config = experiment("scaffold", rounds=2, privacy="central", dp_clip=0.5, dp_noise=0.1)
    pytest.importorskip("dp_accounting")
    plain = fedcog.run(config, tmp_path / "plain", report=False)
    masked = fedcog.run(replace(config, secure_aggregation=True), tmp_path / "masked", report=False)
    for name, value in server_state(plain.path).items():
        torch.testing.assert_close(value, server_state(masked.path)[name], atol=1e-3, rtol=0)
    assert masked.lines[-1]["privacy"] == plain.lines[-1]["privacy"]
    assert masked.lines[-1]["loss"] is None  # clients do not send it


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
@pytest.mark.parametrize("secure", [False, True])
def test_round_is_repeated_when_all_nodes_are_unavailable(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In round 2 Flower reports every node as unavailable."""
    calls = 0

    class UnavailableMeter(TrafficMeter):  # type: ignore[misc, valid-type]
        def __init__(self, grid: Any) -> None:
            super().__init__(
                SimpleNamespace(
                    get_node_ids=grid.get_node_ids, send_and_receive=self._send_and_receive
                )
            )
            self._inner_grid = grid

        def _send_and_receive(
            self, messages: Iterable[Any], *, timeout: float | None = None
        ) -> list[Any]:
            nonlocal calls
            calls += 1
            if calls == (5 if secure else 2):
                error = Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable")
                return [Message(error, reply_to=message) for message in messages]
            return list(self._inner_grid.send_and_receive(messages, timeout=timeout))

    config = experiment("scaffold", rounds=2, backend="flower", secure_aggregation=secure)
    plain = fedcog.run(experiment("scaffold", rounds=2), tmp_path / "plain", report=False)
    monkeypatch.setattr(flower_server, "TrafficMeter", UnavailableMeter)
    with pytest.warns(UserWarning, match=r"in round 2[.:] .*Waiting for them"):
        run = fedcog.run(config, tmp_path / "run", report=False)
    assert [len(line["local"]) for line in run.lines] == [4, 4]
    for name, value in server_state(plain.path).items():
        torch.testing.assert_close(
            value, server_state(run.path)[name], atol=1e-3 if secure else 1e-6, rtol=0
        )


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
def test_payload_out_of_range_fails_the_round_and_is_not_clipped(tmp_path: Path) -> None:
    config = experiment("fedavg", rounds=1, secure_aggregation=True, secure_scale=1e-4)
    with pytest.raises(RuntimeError, match=r"secure aggregation failed.*raise --secure-scale"):
        fedcog.run(config, tmp_path / "run", report=False)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.usefixtures("in_process_flower")
def test_round_continues_without_malformed_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round another client sends NaN, a wrong shape, too many bytes, or a pickle."""

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))  # type: ignore[return-value]

    def corrupt(arrays: ArrayRecord, round: int) -> None:
        name = next(key for key in arrays if key.startswith("total::delta"))
        valid = arrays[name].numpy()
        if round == 0:
            arrays[name] = Array(np.full_like(valid, np.nan))
        elif round == 1:
            arrays[name] = Array(valid.ravel()[:-1].copy())
        elif round == 2:
            arrays["more"] = Array(np.zeros(10**6))
        else:
            data = npy(np.array([Bomb()], dtype=object))
            assert pickle.dumps(Bomb()) and b"exploded" in data
            arrays[name] = Array(
                dtype="float32", shape=valid.shape, stype="numpy.ndarray", data=data
            )

    rounds = 0

    class CorruptingMeter(TrafficMeter):  # type: ignore[misc, valid-type]
        def send_and_receive(
            self, messages: Iterable[Any], *, timeout: float | None = None
        ) -> list[Any]:
            nonlocal rounds
            replies = sorted(
                super().send_and_receive(messages, timeout=timeout),
                key=lambda reply: reply.metadata.src_node_id,
            )
            corrupt(replies[rounds % len(replies)].content["found"], rounds)
            rounds += 1
            return replies

    monkeypatch.setattr(flower_server, "TrafficMeter", CorruptingMeter)
    config = experiment("fedavg", rounds=4, backend="flower")
    with pytest.warns(UserWarning, match="continues without client"):
        run = fedcog.run(config, tmp_path / "run", report=True)
    reasons = [[client["why"] for client in line["refused"]] for line in run.lines]
    assert [len(why) for why in reasons] == [1, 1, 1, 1]
    messages = ["not finite", "but should be torch.float32", "bytes, more than", "not accepted"]
    for (why,), message in zip(reasons, messages, strict=True):
        assert message in why
    assert all(len(line["local"]) == 3 for line in run.lines)
    assert not (tmp_path / "exploded").exists()
    assert "4 times a round continued without a client" in (run.path / "report.html").read_text()


UNSCORED: State = {
    "total": {"delta": {"w": torch.empty(2, 3), "b": torch.empty(3)}, "weight": torch.empty(())},
    "loss": torch.empty(1),
}
CLASS_STATS = torch.empty(1, 2, dtype=torch.int64)
TEMPLATE: State = UNSCORED | {"class_stats": CLASS_STATS}
ANSWER: State = UNSCORED | {"hits": CLASS_STATS}  # its name in messages


def valid_arrays() -> dict[str, np.ndarray]:
    return {
        name: np.ones(value.shape, str(value.dtype).removeprefix("torch."))
        for name, value in tree.flatten(ANSWER).items()
    }


array_names = st.sampled_from(
    [*valid_arrays(), "total", "total::delta", "", "::", "other", "total::delta::w::x"]
)
dtypes = [
    "float32",
    "float64",
    "int64",
    "int8",
    "bool",
    "complex64",
    "U3",
    "S2",
    "O",
    ">f4",
    "float16",
    "M8[s]",
]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def _unusual_array(shape: tuple[int, ...], dtype: str, value: float, order: str) -> bytes:
    with np.errstate(all="ignore"):
        return npy(np.full(shape, value).astype(dtype, order=order))  # type: ignore[call-overload]


unusual_arrays = st.builds(
    _unusual_array,
    shapes,
    st.sampled_from(dtypes[:8] + dtypes[9:11]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from("CF"),
)
not_finite = st.sampled_from([np.nan, np.inf, -np.inf]).map(
    lambda value: npy(np.full((2, 3), value, np.float32))
)
bad_headers = st.sampled_from(
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
truncated = st.integers(0, 150).map(lambda size: npy(np.ones((2, 3), np.float32))[:size])
pickled = st.just(pickle.dumps({"a": 1}))
array_data = st.one_of(
    unusual_arrays, not_finite, bad_headers, truncated, pickled, st.binary(max_size=200)
)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(array_names, array_data, min_size=1, max_size=4),
    st.sets(st.sampled_from(list(valid_arrays())), max_size=2),
    st.booleans(),
)
def test_any_answer_is_accepted_or_refused_with_invalid_payload(
    malformed: dict[str, bytes], missing: set[str], score: bool
) -> None:
    arrays = {
        name: npy(value) for name, value in valid_arrays().items() if name not in missing
    } | malformed
    record = ArrayRecord(
        {name: Array("", (), "numpy.ndarray", data) for name, data in arrays.items()}
    )
    try:
        answer = flower_messages.check_answer(record, TEMPLATE, score)
    except InvalidPayload:
        return
    expected = ANSWER if score else UNSCORED
    flat = tree.flatten(answer)
    assert list(flat) == list(tree.flatten(expected))
    for name, like in tree.flatten(expected).items():
        assert flat[name].shape == like.shape and flat[name].dtype == like.dtype
        assert bool(flat[name].isfinite().all())


@pytest.mark.parametrize("record", [None, ConfigRecord({"a": 1}), "text", 3])
def test_answer_without_arrays_is_refused(record: Any) -> None:
    with pytest.raises(InvalidPayload, match="no arrays"):
        flower_messages.check_answer(record, TEMPLATE, True)


def test_valid_answer_is_accepted() -> None:
    record = ArrayRecord({name: Array(value) for name, value in valid_arrays().items()})
    answer = flower_messages.check_answer(record, TEMPLATE, True)
    assert tree.flatten(answer).keys() == valid_arrays().keys()
