"""An algorithm around another: a few overridden hooks, the others inner's."""

from dataclasses import dataclass, field

from torch import Tensor

from fedcog.algorithms.base import Algorithm, Batch, Draw, Effort, Extra, Loss, Origin, Site, Uplink
from fedcog.models import Model
from fedcog.tree import Params, State


@dataclass(frozen=True)
class Wrapper(Algorithm):
    """An algorithm around another: every hook defers to `inner`."""

    inner: Algorithm = field(default_factory=Algorithm)

    @property
    def uplink(self) -> Uplink:  # type: ignore[override]
        """Inner's."""
        return self.inner.uplink

    @property
    def scales(self) -> dict[str, float]:  # type: ignore[override]
        """Inner's."""
        return self.inner.scales

    @property
    def whole(self) -> bool:  # type: ignore[override]
        """Inner's."""
        return self.inner.whole

    def draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Inner's."""
        return self.inner.draws(round, model, batch_size)

    def server_init(self, origin: Origin) -> State:
        """Inner's."""
        return self.inner.server_init(origin)

    def broadcast(self, server: State) -> State:
        """Inner's."""
        return self.inner.broadcast(server)

    def server_update(self, server: State, total: State, draws: State) -> State:
        """Inner's."""
        return self.inner.server_update(server, total, draws)

    def server_model(self, server: State) -> Params:
        """Inner's."""
        return self.inner.server_model(server)

    def unpack(self, shared: State, draws: State, model: Model) -> State:
        """Inner's."""
        return self.inner.unpack(shared, draws, model)

    def client_init(self, shared: State) -> State:
        """Inner's."""
        return self.inner.client_init(shared)

    def client_start(self, site: Site) -> Params:
        """Inner's."""
        return self.inner.client_start(site)

    def client_buffers(self, site: Site) -> Params:
        """Inner's."""
        return self.inner.client_buffers(site)

    def draft(self, site: Site, draws: State) -> State:
        """Inner's."""
        return self.inner.draft(site, draws)

    def redrafts(self, round: int) -> int:
        """Inner's."""
        return self.inner.redrafts(round)

    def redraft(self, draft: State, site: Site) -> State:
        """Inner's."""
        return self.inner.redraft(draft, site)

    def extra_data(self, site: Site, draft: State) -> Extra:
        """Inner's."""
        return self.inner.extra_data(site, draft)

    def outputs(self, params: Params, batch: Batch, site: Site) -> State:
        """Inner's."""
        return self.inner.outputs(params, batch, site)

    def data_loss(self, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's."""
        return self.inner.data_loss(outputs, batch, site)

    def penalty(self, params: Params, outputs: State, batch: Batch, site: Site) -> Tensor:
        """Inner's."""
        return self.inner.penalty(params, outputs, batch, site)

    def local_grad(self, loss: Loss, params: Params, batch: Batch, site: Site) -> tuple[Params, Tensor]:
        """Inner's, of the loss that is given."""
        return self.inner.local_grad(loss, params, batch, site)

    def after_step(self, before: Params, after: Params, batch: Batch, site: Site) -> Params:
        """Inner's."""
        return self.inner.after_step(before, after, batch, site)

    def client_update(self, params: Params, site: Site, effort: Effort) -> tuple[State, State]:
        """Inner's."""
        return self.inner.client_update(params, site, effort)

    def client_model(self, params: Params, site: Site) -> Params:
        """Inner's."""
        return self.inner.client_model(params, site)
