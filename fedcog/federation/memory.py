"""How many clients a device has memory for."""

import sys

import torch

from fedcog.data.federated import FederatedData
from fedcog.federation.course import autograd
from fedcog.models import Model

PASSES, STATES = 4, 12
"""What a client is reckoned to take up on a GPU: so many forward and backward passes, and so many times its parameters.
Algorithms differ; where it turns out too little, fewer clients are trained at once."""


def clients_that_fit(model: Model, data: FederatedData, batch_size: int) -> int:
    """How many clients fit into what is free of a GPU, by what one forward and backward pass of one takes up."""
    device = data.device
    if device.type != "cuda":
        return sys.maxsize
    torch.cuda.empty_cache()
    before, free = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)[0]
    torch.cuda.reset_peak_memory_stats(device)
    x = torch.zeros((batch_size, *model.input_shape), dtype=data.dtype, device=device)
    buffers = {name: value.clone() for name, value in model.buffers.items()}
    autograd(lambda params, batch: model.forward(params, buffers, batch["x"])[0].sum(), model.params, {"x": x})
    passes = torch.cuda.max_memory_allocated(device) - before
    state = sum(value.nbytes for value in model.params.values())
    return max(1, int(0.8 * free) // (PASSES * passes + STATES * state))
