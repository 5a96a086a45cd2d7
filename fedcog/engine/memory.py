"""How many clients a GPU has memory for."""

import sys

import torch
from torch import Tensor

from fedcog.algorithms import Batch
from fedcog.core.tree import Params
from fedcog.data.client_batches import FederatedData
from fedcog.engine.local_training import autograd_gradient
from fedcog.models.functional import Model
from fedcog.models.ops.keyed_random import trial_key

NUM_PASSES = 4
"""Assumed memory of a client, in forward and backward passes."""
NUM_STATES = 12
"""Assumed memory of a client's states, in copies of its parameters."""
USABLE_FRACTION = 0.8
"""Fraction of the free memory that clients may use."""


def max_clients_in_memory(model: Model, data: FederatedData, batch_size: int) -> int:
    """Estimate how many clients fit into the free memory of a GPU.

    Algorithms need different amounts. If the estimate is too high, the cohort halves it.

    Args:
        model: The network.
        data: The federated data set; its device is examined.
        batch_size: Number of examples in a batch.

    Returns:
        A number of clients; unlimited on a CPU.
    """
    device = data.device
    if device.type != "cuda":
        return sys.maxsize
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0]
    torch.cuda.reset_peak_memory_stats(device)
    x = torch.zeros((batch_size, *model.continuous_shape), dtype=data.dtype, device=device)

    def _total_logits(params: Params, batch: Batch) -> Tensor:
        return model.forward(params, model.buffers, batch["x"], trial_key(device)).logits.sum()

    autograd_gradient(_total_logits, model.params, {"x": x})
    pass_bytes = torch.cuda.max_memory_allocated(device) - before
    param_bytes = sum(value.nbytes for value in model.params.values())
    client_bytes = NUM_PASSES * pass_bytes + NUM_STATES * param_bytes
    return max(1, int(USABLE_FRACTION * free) // client_bytes)
