"""Ditto (Li et al., ICML 2021, algorithm 1): a personal model for each client, held near the global one."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcog import tree
from fedcog.algorithms.base import Batch, Effort, Loss, Origin, Site
from fedcog.algorithms.wrapper import Wrapper
from fedcog.fitness import ModelError
from fedcog.settings import setting
from fedcog.tree import Params, State


@dataclass(frozen=True)
class Ditto(Wrapper):
    """Any algorithm, beside which every client trains a model of its own on the same batches.

    Its loss is the client's plus lambda_pull/2 |v - G|^2, G being the model sent this round. It never travels, has
    momentum and running statistics of its own, and leaves the global model exactly as it would have been. It starts as
    the first model that the client is sent.
    """

    personalises: ClassVar[bool] = True
    lambda_pull: float = setting(1.0, "strength of the pull of the personal model towards the global one", ">= 0")

    def stiffness(self) -> dict[str, float]:
        """That of the pull."""
        return {"lambda_pull": self.lambda_pull}

    def server_init(self, origin: Origin) -> State:
        """Inner's, if it shares the whole model."""
        server = self.inner.server_init(origin)
        if home := sorted(origin.params.keys() - server["params"].keys()):
            raise ModelError(
                f"ditto trains a copy of the model that is sent, and what it goes around keeps {', '.join(home)} at "
                "home: take one or the other."
            )
        return server

    def client_init(self, shared: State) -> State:
        """v = the first G."""
        return self.inner.client_init(shared) | {"personal": shared["params"] | shared["buffers"]}

    def client_start(self, site: Site) -> Params:
        """Inner's, and v aside."""
        return self.inner.client_start(site) | _aside({n: site.own["personal"][n] for n in site.shared["params"]})

    def client_buffers(self, site: Site) -> Params:
        """Inner's, and v's aside."""
        return self.inner.client_buffers(site) | _aside({n: site.own["personal"][n] for n in site.shared["buffers"]})

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """Inner's."""
        return self.inner.outputs(_main(params), batch, site)

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's."""
        return self.inner.penalty(_main(params), outputs, batch, site)

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """Inner's for the global model; for v, that of its own loss."""
        personal, here = _own(params), dataclasses.replace(site, buffers=_own(site.buffers))

        def pulled(v: Params, batch: Batch) -> Tensor:
            drift = tree.change(site.shared["params"], v)
            fit = site.task.loss(here.logits(v, batch["x"]), batch["y"]).mean()
            return fit + self.lambda_pull / 2 * tree.dot(drift, drift)

        grads, value = self.inner.local_grad(loss, _main(params), batch, site)
        grads = grads | _aside(site.gradient(pulled, personal, batch)[0])
        site.buffers.update(_aside(here.buffers))  # what v's pass made of its running statistics
        return grads, value

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """Inner's for the global model."""
        return self.inner.after_step(_main(before), _main(after), batch, site) | _aside(_own(after))

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Inner's; v stays here."""
        own, payload = self.inner.client_update(_main(params), site, effort)
        return own | {"personal": _own(params) | _own(site.buffers)}, payload

    def client_model(self, params: Params, site: Site) -> Params:
        """v."""
        return _own(params) | _own(site.buffers)


_PREFIX = "personal.."


def _aside(params: Params) -> Params:
    return {_PREFIX + name: value for name, value in params.items()}


def _own(params: Params) -> Params:
    return {name.removeprefix(_PREFIX): value for name, value in params.items() if name.startswith(_PREFIX)}


def _main(params: Params) -> Params:
    return {name: value for name, value in params.items() if not name.startswith(_PREFIX)}
