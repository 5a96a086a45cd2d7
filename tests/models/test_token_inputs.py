"""Tokens have no gradient: networks of them are refused where inputs are optimised, and data of
them everywhere.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedcog
from fedcog import ConfigError, DataError, Experiment, FedAvg, FedCOG, FedReg, ModelError


class Tokens(nn.Module):
    """A bag of words."""

    def __init__(self, rounded: bool = True) -> None:
        super().__init__()
        self.rounded = rounded
        self.words = nn.Embedding(20, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x.round().clamp(0, 19).long() if self.rounded else x).mean(1))


X = torch.randint(0, 20, (60, 5))
Y = torch.arange(60) % 3
SMALL = {
    "rounds": 1,
    "local_steps": 2,
    "batch_size": 8,
    "clients": 2,
    "partition": "iid",
    "threads": 1,
    "workers": 1,
}


def test_numbers_of_tokens_are_no_data() -> None:
    with pytest.raises(
        DataError, match=r"train_x is int64 \[60, 5\]: .* floats of any shape \(tokens embedded\)"
    ):
        fedcog.from_arrays(X, Y, X[:9], Y[:9])


@pytest.mark.parametrize("algorithm", [FedCOG(start_round=0, count=4, steps=1), FedReg()])
def test_what_optimises_inputs_refuses_a_network_without_gradient(
    tmp_path: Path, algorithm: fedcog.Algorithm
) -> None:
    data = fedcog.from_arrays(X.float(), Y, X[:9].float(), Y[:9])
    one = Experiment(algorithm=algorithm, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="optimizes inputs, but this network's outputs have no gradient"
    ):
        fedcog.run(one, tmp_path / "refused", data=data, model=Tokens())
    plain = Experiment(algorithm=FedAvg(), **SMALL)  # type: ignore[arg-type]
    assert fedcog.run(plain, tmp_path / "plain", data=data, model=Tokens(), report=False).scores
    fedcog.run(
        one, tmp_path / "smooth", data=data, model=nn.Sequential(nn.Linear(5, 3)), report=False
    )


def test_an_embedding_that_asks_for_whole_numbers_is_told_why_it_gets_none(tmp_path: Path) -> None:
    data = fedcog.from_arrays(X.float(), Y, X[:9].float(), Y[:9])
    with pytest.raises(ModelError, match="token numbers are not: give embedded tokens, as floats"):
        fedcog.run(Experiment(**SMALL), tmp_path, data=data, model=Tokens(rounded=False))  # type: ignore[arg-type]


def test_a_loop_of_ones_own_is_told_the_same() -> None:
    with pytest.raises(ModelError, match="no gradient with respect to its inputs"):
        fedcog.generate(Tokens(), Tokens(), [5, 0, 0], (5,), round=1, client=0, steps=2, count=4)
