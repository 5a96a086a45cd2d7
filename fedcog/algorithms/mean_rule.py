"""Rules for the mean of the clients' updates, around any algorithm."""

from dataclasses import dataclass
from typing import ClassVar

from fedcog.algorithms.server_rule import needs_mean_reason
from fedcog.algorithms.wrapper import Wrapper, name_of
from fedcog.core.settings import ConfigError


@dataclass(frozen=True)
class MeanRule(Wrapper):
    """Base class of wrappers that replace the weighted mean of the clients' updates.

    The rule applies to the change of the parameters and of the running statistics. What else an
    inner algorithm sends, such as control variates, is summed as before.
    """

    is_mean_rule: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a second rule for the mean, and clients that train parts of the model."""
        super().__post_init__()
        own = name_of(self)
        for layer in self.inner.layers:
            name = name_of(layer)
            if layer.is_mean_rule:
                raise ConfigError(
                    [
                        f"{own} replaces the mean of the clients' updates, and so does {name}: "
                        "keep one of them."
                    ]
                )
            if layer.needs_mean:
                raise ConfigError([needs_mean_reason(name)])
            if layer.sends_coverage:
                raise ConfigError(
                    [
                        f"{own} compares whole updates, but clients of {name} train parts of the "
                        "model: remove one of them."
                    ]
                )

    @property
    def applies_mean(self) -> bool:  # type: ignore[override]
        """Whether the server applies the weighted mean of the clients' updates: it does not."""
        return False

    @property
    def needs_full_model(self) -> bool:  # type: ignore[override]
        """Whether it fails when some clients train only a part of the model: it does."""
        return True
