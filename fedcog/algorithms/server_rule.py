"""Rules for the step of the server's model, around any algorithm."""

from dataclasses import dataclass
from typing import ClassVar

from fedcog.algorithms.wrapper import Wrapper, name_of
from fedcog.core.settings import ConfigError


@dataclass(frozen=True)
class ServerRule(Wrapper):
    """Base class of wrappers that turn the mean update into the step of the server's model.

    The inner algorithm trains the clients, corrects the sum of the payloads (`aggregate`) and keeps
    server state of its own, such as control variates.
    """

    implies_fedavg: ClassVar[bool] = True
    is_server_rule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse inner algorithms with a rule of their own for the model."""
        super().__post_init__()
        own = name_of(self)
        if self.needs_mean and not self.inner.applies_mean:
            raise ConfigError([needs_mean_reason(own)])
        for layer in self.inner.layers:
            name = name_of(layer)
            if layer.is_server_rule:
                raise ConfigError(
                    [
                        f"{own} goes around algorithms without a server rule, but {name} is one: "
                        "each decides how far the model moves. Keep one of them."
                    ]
                )
            if not layer.has_server_step:
                raise ConfigError(
                    [
                        f"{own} changes the step of the server's model, but the server of {name} "
                        "sets the model from its memory of all clients: remove one of them."
                    ]
                )


def needs_mean_reason(name: str) -> str:
    """Return why a server rule refuses a robust mean, or other weights.

    Args:
        name: The server rule.

    Returns:
        A sentence with a remedy.
    """
    return (
        f"{name} steps the further the longer the updates of all clients are, and so undoes a rule "
        "that leaves some of them out: choose another server rule, such as fedavgm."
    )
