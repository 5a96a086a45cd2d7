"""Tests that token inputs are refused, because tokens have no gradient."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedcog
from fedcog import ConfigError, DataError, Experiment, FedAvg, FedCOG, FedReg, ModelError


class TokenClassifier(nn.Module):
    """A bag-of-words classifier. With `rounded` it rounds float inputs to token ids."""

    def __init__(self, rounded: bool = True) -> None:
        super().__init__()
        self.rounded = rounded
        self.words = nn.Embedding(20, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.round().clamp(0, 19).long() if self.rounded else x
        return self.last(self.words(tokens).mean(1))


X = torch.randint(0, 20, (60, 5))
Y = torch.arange(60) % 3
SMALL_RUN = {
    "rounds": 1,
    "local_steps": 2,
    "batch_size": 8,
    "clients": 2,
    "partition": "iid",
    "threads": 1,
    "workers": 1,
}


def test_integer_tokens_are_refused_as_data() -> None:
    with pytest.raises(
        DataError, match=r"train_x is int64 \[60, 5\]: .* floats of any shape \(tokens embedded\)"
    ):
        fedcog.from_arrays(X, Y, X[:9], Y[:9])


@pytest.mark.parametrize("algorithm", [FedCOG(start_round=0, count=4, steps=1), FedReg()])
def test_input_optimization_refuses_network_without_gradient(
    tmp_path: Path, algorithm: fedcog.Algorithm
) -> None:
    data = fedcog.from_arrays(X.float(), Y, X[:9].float(), Y[:9])
    config = Experiment(algorithm=algorithm, **SMALL_RUN)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="optimizes inputs, but this network's outputs have no gradient"
    ):
        fedcog.run(config, tmp_path / "refused", data=data, model=TokenClassifier())
    plain = Experiment(algorithm=FedAvg(), **SMALL_RUN)  # type: ignore[arg-type]
    assert fedcog.run(
        plain, tmp_path / "plain", data=data, model=TokenClassifier(), report=False
    ).scores
    fedcog.run(
        config, tmp_path / "smooth", data=data, model=nn.Sequential(nn.Linear(5, 3)), report=False
    )


def test_embedding_of_float_inputs_is_refused_with_reason(tmp_path: Path) -> None:
    data = fedcog.from_arrays(X.float(), Y, X[:9].float(), Y[:9])
    with pytest.raises(ModelError, match="token numbers are not: give embedded tokens, as floats"):
        fedcog.run(
            Experiment(**SMALL_RUN), tmp_path, data=data, model=TokenClassifier(rounded=False)
        )  # type: ignore[arg-type]


def test_generate_refuses_network_without_gradient() -> None:
    with pytest.raises(ModelError, match="no gradient with respect to its inputs"):
        fedcog.generate(
            TokenClassifier(),
            TokenClassifier(),
            [5, 0, 0],
            (5,),
            round=1,
            client=0,
            steps=2,
            count=4,
        )
