"""A federation after some rounds, ready for the next one: what probes and audits measure."""

from typing import Any, NamedTuple

from fedcog.core import tree
from fedcog.core.tree import Params, State
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.setup import ExperimentSetup

Measurement = dict[str, Any]
"""What is measured, as it is stored: numbers, strings, lists and tables of them."""


class FederationState(NamedTuple):
    """A federation after some rounds, ready for the next one.

    Attributes:
        prepared: Data, network and simulator.
        server: The server state.
        round: The next round, from 0.
        warm_start: The run that led here, if it is another one.
    """

    prepared: ExperimentSetup
    server: State
    round: int
    warm_start: Experiment | None

    @property
    def shared(self) -> State:
        """What the server would send to the clients in the next round."""
        shared: State = self.prepared.experiment.algorithm.broadcast(self.server)
        return shared

    @property
    def weights(self) -> Params:
        """The parameters of the global model."""
        return self.prepared.experiment.algorithm.server_model(self.server)


def restore(
    prepared: ExperimentSetup, checkpoint: Checkpoint, warm_start: Experiment | None = None
) -> FederationState:
    """Restore server and clients of a checkpoint.

    Args:
        prepared: Data, network and simulator.
        checkpoint: The checkpoint.
        warm_start: The run that it is from, if it is another one.

    Returns:
        The federation, ready for the next round.
    """
    server = tree.to(checkpoint.server, prepared.device)
    prepared.server_state = server
    prepared.simulator.client_states.restore(checkpoint.clients)
    return FederationState(prepared, server, checkpoint.round, warm_start)
