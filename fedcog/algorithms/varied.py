"""FedCOG with complements of our own: what was tried beyond the paper. What came of it stands in docs/results.md."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcog import generation, tree
from fedcog.algorithms.base import Draw, Effort, Origin, Site
from fedcog.algorithms.fedcog import FedCOG
from fedcog.models import Model
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class Varied(FedCOG):
    """FedCOG whose inputs are regularised or mixed with noise, its share annealed, its teacher or server averaged.

    As it stands it is FedCOG; every setting changes one thing. It is no algorithm that `fedcog run` knows by name.
    """

    smooth: float = setting(0.0, "weight of the inputs' total variation", ">= 0")
    small: float = setting(0.0, "weight of the inputs' mean square", ">= 0")
    like: float = setting(0.0, "weight of the distance between features' statistics and those of real examples", ">= 0")
    noise_share: float = setting(0.0, "share of the inputs that stay noise", ">= 0", "<= 1")
    anneal: float = setting(1.0, "factor on the generated share after every round awake", "> 0", "<= 1")
    memory: float = setting(0.0, "share of the teacher before in this round's, a moving mean", ">= 0", "< 1")
    average: float = setting(0.0, "share of the model before in the one that is judged, a moving mean", ">= 0", "< 1")

    def server_init(self, origin: Origin) -> State:
        """Inner's, and the mean of its models."""
        server = super().server_init(origin)
        return server | ({"average": self.inner.server_model(server)} if self.average else {})

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Inner's; the mean moves on."""
        after = super().server_update(server, total, draws)
        if not self.average:
            return after
        return after | {"average": _moved(server["average"], self.inner.server_model(after), self.average)}

    def server_model(self, server: State) -> Params:
        """The mean, where there is one."""
        model: Params = server["average"] if self.average else super().server_model(server)
        return model

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """FedCOG's, and real examples to be like."""
        found = super().draws(round, model, batch_size)
        real = Draw((self.count,), kind="examples")
        return found | ({"real": real} if self.like and "noise" in found else {})

    def client_init(self, shared: State) -> State:
        """FedCOG's, and the teacher."""
        own = super().client_init(shared)
        return own | ({"teacher": shared["params"] | shared["buffers"]} if self.memory else {})

    def draft(self, site: Site, draws: State) -> State:
        """FedCOG's, and what real features are like."""
        draft = super().draft(site, draws)
        if not self.like or "made" not in draft:
            return draft
        features = site.model.features(self._teacher(site), draws["real"]["x"])
        return draft | {"like": {"mean": features.mean(0), "deviation": features.std(0)}}

    def redraft(self, draft: State, site: Site) -> State:
        """FedCOG's, of all but those that stay noise."""
        after = super().redraft(draft, site)
        if not self.noise_share or "made" not in draft:
            return after
        moving = torch.arange(self.count, device=site.lr.device) < round(self.count * (1 - self.noise_share))

        def mixed(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(moving.reshape(-1, *[1] * (new.dim() - 1)), new, old)

        learnt = {"x": mixed(after["made"]["learnt"]["x"], draft["made"]["learnt"]["x"])}
        return after | {"made": after["made"] | {"learnt": learnt}}

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """FedCOG's; the teacher is kept as it was in this round."""
        own, payload = super().client_update(params, site, effort)
        return own | ({"teacher": self._teacher(site)} if self.memory else {}), payload

    def _teacher(self, site: Site) -> Params:
        teacher = super()._teacher(site)
        return teacher | _moved(site.own["teacher"], teacher, self.memory) if self.memory else teacher

    def _shares(self, site: Site) -> tuple[Tensor | float, Tensor | float]:
        real, made = super()._shares(site)
        if self.anneal == 1:
            return real, made
        faded = made * self.anneal ** (site.round - self.start_round).clamp(min=0).to(site.lr.dtype)
        return (1 - faded if self._balanced(site) else real), faded

    def _objective(self, site: Site, draft: State) -> generation.Loss:
        loss, render = super()._objective(site, draft), self._render(site)
        teacher = self._teacher(site)

        def regularised(learnt: Params, batch: Params) -> Tensor:
            x, value = render(learnt), loss(learnt, batch)
            if self.smooth:
                value = value + self.smooth * _variation(x)
            if self.small:
                value = value + self.small * x.square().mean()
            if self.like:
                features = site.model.features(teacher, x)
                means = (features.mean(0) - draft["like"]["mean"]).square().mean()
                value = value + self.like * (means + (features.std(0) - draft["like"]["deviation"]).square().mean())
            return value

        return regularised


def _moved(before: Params, now: Params, share: float) -> Params:
    """The moving mean of models."""
    return tree.add(tree.scale(share, before), tree.scale(1 - share, {name: now[name] for name in before}))


def _variation(x: Tensor) -> Tensor:
    """How much neighbouring pixels differ, on average."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()
