"""Variants of FedCOG that were tried beyond the paper; docs/results.md has their results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog.algorithms import generation
from fedcog.algorithms.fedcog import FedCOG
from fedcog.algorithms.types import ClientContext, Draw, FederationInit, LocalWork
from fedcog.core import tree
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models.functional import Model


@dataclass(frozen=True)
class Varied(FedCOG):
    """FedCOG with regularized or noisy inputs, an annealed weight, or averaged models.

    With its defaults it is FedCOG; every setting changes one thing. `fedcog run` does not know it
    by name.
    """

    smooth: float = setting(0.0, "weight of the inputs' total variation", ">= 0")
    small: float = setting(0.0, "weight of the inputs' mean square", ">= 0")
    like: float = setting(
        0.0, "weight of the distance to the feature statistics of real examples", ">= 0"
    )
    noise_share: float = setting(0.0, "fraction of the inputs that stay noise", ">= 0", "<= 1")
    anneal: float = setting(
        1.0, "factor per round on the weight of the generated loss", "> 0", "<= 1"
    )
    memory: float = setting(
        0.0, "weight of the previous teacher in a moving average of teachers", ">= 0", "< 1"
    )
    average: float = setting(
        0.0, "weight of the previous model in the evaluated moving average", ">= 0", "< 1"
    )

    @property
    def has_server_step(self) -> bool:  # type: ignore[override]
        """The moving average of models follows the unscaled update."""
        return not self.average

    def server_init(self, init: FederationInit) -> State:
        """Start the moving average of models."""
        server = super().server_init(init)
        if self.average:
            server = server | {"average": self.inner.server_model(server)}
        return server

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Update the moving average of models.

        Returns:
            The server state after the round.
        """
        after = super().server_update(server, total, draws)
        if not self.average:
            return after
        model = self.inner.server_model(after)
        return after | {"average": _moving_average(server["average"], model, self.average)}

    def server_model(self, server: State) -> Params:
        """Return the moving average, if there is one."""
        model: Params = server["average"] if self.average else super().server_model(server)
        return model

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Also request real examples for the feature statistics.

        Returns:
            Requests by name.
        """
        draws = super().request_draws(round, model, batch_size)
        if self.like and "noise" in draws:
            draws = draws | {"real": Draw((self.count,), kind="examples")}
        return draws

    def client_init(self, broadcast: State) -> State:
        """Start the moving average of teachers."""
        state = super().client_init(broadcast)
        if self.memory:
            state = state | {"teacher": broadcast["params"] | broadcast["buffers"]}
        return state

    def generation_init(self, client: ClientContext, draws: State) -> State:
        """Add the feature statistics of real examples.

        Returns:
            The generation state.
        """
        gen_state = super().generation_init(client, draws)
        if not self.like or "made" not in gen_state:
            return gen_state
        features = client.model.features(self._teacher(client), draws["real"]["x"])
        return gen_state | {"like": {"mean": features.mean(0), "deviation": features.std(0)}}

    def generation_step(self, gen_state: State, client: ClientContext) -> State:
        """Leave a fraction of the inputs as noise.

        Returns:
            The generation state after the step.
        """
        after = super().generation_step(gen_state, client)
        if not self.noise_share or "made" not in gen_state:
            return after
        num_optimized = round(self.count * (1 - self.noise_share))
        is_optimized = torch.arange(self.count, device=client.lr.device) < num_optimized
        new = after["made"]["optimized"]["x"]
        old = gen_state["made"]["optimized"]["x"]
        x = torch.where(is_optimized.reshape(-1, *[1] * (new.dim() - 1)), new, old)
        return after | {"made": after["made"] | {"optimized": {"x": x}}}

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Keep this round's teacher.

        Returns:
            (state, payload).
        """
        state, payload = super().client_update(params, client, work)
        if self.memory:
            state = state | {"teacher": self._teacher(client)}
        return state, payload

    def _teacher(self, client: ClientContext) -> Params:
        teacher = super()._teacher(client)
        if not self.memory:
            return teacher
        return teacher | _moving_average(client.state["teacher"], teacher, self.memory)

    def _loss_weights(self, client: ClientContext) -> tuple[Tensor | float, Tensor | float]:
        real_weight, made_weight = super()._loss_weights(client)
        if self.anneal == 1:
            return real_weight, made_weight
        num_rounds = (client.round - self.start_round).clamp(min=0).to(client.lr.dtype)
        annealed = made_weight * self.anneal**num_rounds
        if self._is_balanced(client):
            real_weight = 1 - annealed
        return real_weight, annealed

    def _objective(self, client: ClientContext, gen_state: State) -> generation.Loss:
        loss = super()._objective(client, gen_state)
        render = self._render(client)
        teacher = self._teacher(client)

        def _regularized(optimized: Params, batch: Params) -> Tensor:
            x = render(optimized)
            value = loss(optimized, batch)
            if self.smooth:
                value = value + self.smooth * _total_variation(x)
            if self.small:
                value = value + self.small * x.square().mean()
            if self.like:
                features = client.model.features(teacher, x)
                real = gen_state["like"]
                mean_gap = (features.mean(0) - real["mean"]).square().mean()
                deviation_gap = (features.std(0) - real["deviation"]).square().mean()
                value = value + self.like * (mean_gap + deviation_gap)
            return value

        return _regularized


def _moving_average(before: Params, now: Params, weight: float) -> Params:
    """Return weight * before + (1 - weight) * now, over the names of `before`."""
    current = {name: now[name] for name in before}
    return tree.add(tree.scale(weight, before), tree.scale(1 - weight, current))


def _total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighboring pixels."""
    vertical = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    horizontal = (x[..., 1:] - x[..., :-1]).abs().mean()
    return vertical + horizontal
