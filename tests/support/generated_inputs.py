"""Inputs that FedCOG generates for one client of a toy federation."""

import dataclasses
from typing import Any

import torch

from fedcog.algorithms import Batch, ClientContext, FedCOG
from fedcog.core import tree
from fedcog.engine.local_training import CohortClients, RoundInputs
from fedcog.models.ops.keyed_random import seed_words
from fedcog.testing import ToyFederation


def generate_inputs(
    algorithm: FedCOG, rounds: int = 1, **settings: Any
) -> tuple[ToyFederation, ClientContext, Batch]:
    """Return a toy federation, client 0's context, and its generated data after `rounds` rounds."""
    toy = ToyFederation(dataclasses.replace(algorithm, start_round=0), rounds=rounds, **settings)
    toy.run()
    simulator = toy.simulator
    broadcast = toy.algorithm.broadcast(toy.server.state)
    state = simulator.client_state(toy.algorithm, broadcast, 0)
    clients = CohortClients(
        torch.tensor(0),
        {"previous": state["previous"]},
        simulator.weights[0],
        simulator.class_counts[0],
        simulator.label_set_sizes[0],
        simulator.num_steps[0],
        seed_words(0),
    )
    training = simulator.cohort.local_training(toy.algorithm)
    lr = torch.tensor(0.1, dtype=torch.float64)
    inputs = RoundInputs(clients, broadcast, lr, torch.tensor(rounds))
    client = training.context(clients, inputs, broadcast["buffers"], torch.tensor(0))
    draws = tree.take(simulator.cohort.draws(algorithm, "client", rounds, torch.tensor([0])), 0)
    with torch.no_grad():
        gen_state = algorithm.generation_init(client, draws)
        for step in torch.arange(algorithm.num_generation_steps(rounds)):
            gen_state = algorithm.generation_step(gen_state, dataclasses.replace(client, step=step))
        return toy, client, algorithm.extra_data(client, gen_state).groups["made"]
