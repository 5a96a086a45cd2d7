"""Recurrent layers in plain operators, which vmap maps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcog.models.ops.layers import LayerOverrides


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True}, {"num_layers": 2, "batch_first": True, "bias": False}]
)
def test_layers_are_torchs_also_under_vmap(
    kind: type[nn.RNNBase], options: dict[str, Any], dtype: torch.dtype
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = kind(3, 4, dtype=dtype, **options).requires_grad_(False)  # type: ignore[call-arg]
        x = torch.randn(2, 5, 6, 3, dtype=dtype)

    def _run(x: Tensor) -> Tensor:
        output: Tensor = layer(x)[0]
        return output

    expected = torch.stack([_run(part) for part in x])
    with LayerOverrides():
        torch.testing.assert_close(_run(x[0]), expected[0])
        torch.testing.assert_close(torch.func.vmap(_run)(x), expected)


def test_packed_sequences_are_left_to_torch() -> None:
    layer = nn.LSTM(3, 4)
    packed = nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    expected = layer(packed)[0].data
    with LayerOverrides():
        assert torch.equal(layer(packed)[0].data, expected)
