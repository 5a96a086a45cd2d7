"""Tests of networks on tokens: every algorithm runs, and generated inputs are embeddings."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcog
from fedcog import ALGORITHMS, ConfigError, Experiment, FedAvg, FedCOG, FedProx, FedReg, ModelError
from fedcog.models.functional import Model
from fedcog.runs.records.run_directory import RunDirectory

NUM_TOKENS = 20
LENGTH = 6
SIZE = 8


class Sentences(nn.Module):
    """A small recurrent classifier of token sequences, with dropout on embeddings."""

    def __init__(self, num_tokens: int = NUM_TOKENS, num_classes: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(num_tokens, SIZE)
        self.drop = nn.Dropout(0.1)
        self.mix = nn.Conv1d(SIZE, 16, 3, padding=1)
        self.last = nn.Linear(16, num_classes)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.drop(self.words(tokens))  # type: ignore[no-any-return]

    def forward_embedded(self, x: Tensor) -> Tensor:
        return self.last(self.mix(x.mT).relu().mean(2))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.forward_embedded(self.embed(tokens))


class RoundedTokens(nn.Module):
    """A bag-of-words classifier that rounds float inputs to token ids, so it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_TOKENS, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x.round().clamp(0, 19).long()).mean(1))  # type: ignore


def sentences(count: int = 120) -> fedcog.Dataset:
    """Sentences whose class decides which third of the vocabulary most words are from."""
    rng = np.random.default_rng(0)
    y = np.arange(count) % 3
    topic = rng.integers(0, 6, (count, LENGTH)) + 6 * y[:, None]
    x = np.where(rng.random((count, LENGTH)) < 0.7, topic, rng.integers(0, 20, (count, LENGTH)))
    split = 3 * count // 4
    return fedcog.from_arrays(x[:split], y[:split], x[split:], y[split:])


DATA = sentences()
SMALL = Experiment(
    clients=3, partition="iid", rounds=2, local_steps=3, batch_size=8, threads=1, workers=1, lr=0.1
)
GENERATION = {"start_round": 1, "count": 6, "steps": 3}


def all_algorithms() -> list[fedcog.Algorithm]:
    few = {"attackers": 0}  # three clients
    bare = [
        cls(**few if "krum" in name else {})
        for name, cls in ALGORITHMS.items()
        if name != "heterofl"
    ]
    return [*bare, FedCOG(FedProx(), **GENERATION), FedCOG(**GENERATION)]


@pytest.mark.parametrize("algorithm", all_algorithms(), ids=repr)
def test_every_algorithm_runs_on_tokens_in_loop_and_vmap(
    algorithm: fedcog.Algorithm, tmp_path: Path
) -> None:
    losses = []
    for mapping in ("loop", "vmap"):
        experiment = dataclasses.replace(
            SMALL, algorithm=algorithm, mapping=mapping, precision="float64"
        )
        if algorithm.generation_start is not None and algorithm.generation_start > 1:
            continue  # FedCOG with its defaults, of which two rounds show nothing
        out = tmp_path / mapping
        run = fedcog.run(experiment, out, data=DATA, model=Sentences, report=False)
        losses.append([line["loss"] for line in run.lines])
    if losses:
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_fedcog_generates_embeddings(tmp_path: Path) -> None:
    experiment = dataclasses.replace(SMALL, algorithm=FedCOG(**GENERATION))
    run = fedcog.run(experiment, tmp_path, data=DATA, model=Sentences)
    made = RunDirectory(run.path).artifacts(2)
    assert made is not None and made["images"].shape[2:] == (LENGTH, SIZE)
    page = (run.path / "report.html").read_text()
    assert "not pictures, so generated ones are not shown" in page
    plain = fedcog.run(SMALL, tmp_path / "plain", data=DATA, model=Sentences, report=False)
    assert run.lines[0]["loss"] == plain.lines[0]["loss"]
    assert run.lines[1]["loss"] != plain.lines[1]["loss"]


def test_resume_is_byte_equal(tmp_path: Path) -> None:
    experiment = dataclasses.replace(SMALL, algorithm=FedCOG(**GENERATION), rounds=3)
    straight = fedcog.run(experiment, tmp_path / "a", data=DATA, model=Sentences, report=False)
    short = dataclasses.replace(experiment, rounds=2)
    fedcog.run(short, tmp_path / "b", data=DATA, model=Sentences, report=False)
    resumed = fedcog.run(
        experiment, tmp_path / "b", data=DATA, model=Sentences, resume=True, report=False
    )
    name = "checkpoint.safetensors"
    assert (straight.path / name).read_bytes() == (resumed.path / name).read_bytes()


def test_accuracy_is_that_of_the_plain_network(tmp_path: Path) -> None:
    experiment = dataclasses.replace(SMALL, rounds=10, local_steps=10)
    run = fedcog.run(experiment, tmp_path, data=DATA, model=Sentences, report=False)
    network = fedcog.load(tmp_path, model=Sentences)
    with torch.no_grad():
        accuracy = (network(DATA.test_x).argmax(1) == DATA.test_y).double().mean()
    assert run.last == pytest.approx(float(accuracy)) and run.last > 0.6


def test_network_needs_no_forward_of_its_own(tmp_path: Path) -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(NUM_TOKENS, SIZE)
            self.last = nn.Linear(SIZE, 3)

        def embed(self, tokens: Tensor) -> Tensor:
            return self.words(tokens)  # type: ignore[no-any-return]

        def forward_embedded(self, x: Tensor) -> Tensor:
            return self.last(x.mean(1))  # type: ignore[no-any-return]

    run = fedcog.run(SMALL, tmp_path, data=DATA, model=Short, report=False)
    network = fedcog.load(tmp_path, model=Short)
    with torch.no_grad():
        accuracy = (network(DATA.test_x).argmax(1) == DATA.test_y).double().mean()
    assert run.last == pytest.approx(float(accuracy))


@pytest.mark.compiler
def test_exported_network_takes_tokens(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    fedcog.run(SMALL, tmp_path, data=DATA, model=Sentences, report=False)
    file = fedcog.export(tmp_path, format="onnx", model=Sentences).path
    session = runtime.InferenceSession(file)
    (logits,) = session.run(None, {session.get_inputs()[0].name: DATA.test_x.numpy()})
    network = fedcog.load(tmp_path, model=Sentences)
    with torch.no_grad():
        expected = network(DATA.test_x).numpy()
    assert np.abs(logits - expected).max() < 1e-5


def test_model_takes_tokens_and_embeddings() -> None:
    network = Sentences()
    model = Model(network, (LENGTH,), 3)
    assert model.input_shape == (LENGTH,) and model.continuous_shape == (LENGTH, SIZE)
    weights = model.params | model.buffers
    tokens = DATA.test_x[:5]
    expected = network.eval()(tokens)
    embedded = model.embed(weights, tokens)
    assert torch.equal(embedded, network.words(tokens))
    assert torch.allclose(model.predict(weights, tokens), expected)
    assert torch.allclose(model.predict(weights, embedded), expected)
    assert model.uses_dropout and model.predict(weights, tokens).dtype == torch.float32
    assert "embed_only" not in network.forward.__code__.co_varnames, "the user's network is a copy"


def test_unsuitable_tokens_and_networks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no embedding for token 19.*at least 20"):
        fedcog.run(SMALL, tmp_path / "a", data=DATA, model=lambda: Sentences(15))
    unknown = fedcog.from_arrays(DATA.train_x, DATA.train_y, DATA.test_x + 5, DATA.test_y)
    with pytest.raises(ModelError, match="no embedding for token 24"):
        fedcog.run(SMALL, tmp_path / "a", data=unknown, model=lambda: Sentences(20))
    with pytest.raises(ModelError, match="no network by name takes: give your own"):
        fedcog.run(SMALL, tmp_path / "b", data=DATA)
    floats = fedcog.from_arrays(DATA.train_x.float(), DATA.train_y)
    experiment = dataclasses.replace(SMALL, local_test=0.2)
    with pytest.raises(ModelError, match=r"the inputs are torch\.float32: give int64"):
        fedcog.run(experiment, tmp_path / "c", data=floats, model=Sentences)
    with pytest.raises(fedcog.DataError, match="train_x holds -1: number the tokens from 0"):
        fedcog.from_arrays(DATA.train_x - 1, DATA.train_y)


@pytest.mark.parametrize("algorithm", [FedCOG(start_round=0, count=4, steps=1), FedReg()])
def test_input_optimization_refuses_network_without_gradient(
    tmp_path: Path, algorithm: fedcog.Algorithm
) -> None:
    x = DATA.train_x.float()
    data = fedcog.from_arrays(x, DATA.train_y, x[:9], DATA.train_y[:9])
    config = dataclasses.replace(SMALL, algorithm=algorithm)
    with pytest.raises(
        ConfigError, match="optimizes inputs, but this network's outputs have no gradient"
    ):
        fedcog.run(config, tmp_path / "refused", data=data, model=RoundedTokens())
    plain = dataclasses.replace(SMALL, algorithm=FedAvg())
    out = tmp_path / "plain"
    assert fedcog.run(plain, out, data=data, model=RoundedTokens(), report=False).scores


def test_generate_makes_embeddings_in_a_loop_of_ones_own() -> None:
    network = Sentences()
    made = fedcog.generate(
        network, None, [30, 0, 0], (LENGTH,), round=1, client=0, count=6, steps=2
    )
    assert made.x.shape == (6, LENGTH, SIZE) and 0 not in made.y.tolist()
    network.train()
    loss = made.loss(nn.functional.cross_entropy(network(DATA.train_x), DATA.train_y), network)
    loss.backward()
    assert network.words.weight.grad is not None and network.mix.weight.grad is not None


def test_generate_refuses_network_without_gradient() -> None:
    with pytest.raises(ModelError, match="no gradient with respect to its inputs"):
        fedcog.generate(
            RoundedTokens(),
            RoundedTokens(),
            [5, 0, 0],
            (5,),
            round=1,
            client=0,
            steps=2,
            count=4,
        )
