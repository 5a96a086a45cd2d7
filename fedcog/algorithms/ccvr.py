"""CCVR (Luo et al., NeurIPS 2021): the head is trained again on virtual features of all classes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcog.algorithms.types import Batch, Draw, FederationInit
from fedcog.algorithms.wrapper import Wrapper
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State
from fedcog.models.checks import ModelError
from fedcog.models.functional import Model
from fedcog.models.heads import train_head

RIDGE = 1e-3
"""Share of the mean variance that is added to every variance, so that covariances are regular."""


@dataclass(frozen=True)
class CCVR(Wrapper):
    """Any algorithm, whose model is evaluated with a head that was calibrated after training.

    All clients add up, over their training examples and under the current model, the number of
    examples, the features and their products of every class. The server draws normally distributed
    features with these means and covariances, the same number of every class, and trains the head
    on them. The calibrated head is evaluated and saved, and never sent to clients, so training is
    that of the algorithm inside; only power-of-choice ranks clients by the calibrated model. Rounds
    without evaluation keep the last calibrated head. Records of traffic leave these sums out.
    Features after a ReLU are not normally distributed. 2000 features a class are from memory of the
    paper; how it trains the head was not found, here it is Adam on all features at once.
    """

    needs_features: ClassVar[bool] = True
    single_label_reason: ClassVar[str] = (
        "ccvr draws features of one class at a time, so an example must have exactly one class."
    )
    samples: int = setting(
        2000, "number of virtual features per class; 0 is no calibration", ">= 0"
    )
    steps: int = setting(100, "number of training steps of the head", ">= 0")
    lr: float = setting(0.01, "learning rate of the head (Adam)", "> 0")

    @property
    def payload_bounds(self) -> dict[str, float]:  # type: ignore[override]
        """The inner bounds, and those of the sums over a client's examples.

        They are low, because the covariance needs precision: with many examples or large features,
        raise `--secure-scale`.
        """
        return self.inner.payload_bounds | {
            "num_examples": 2.0**14,
            "feature_sum": 2.0**12,
            "feature_products": 2.0**12,
        }

    @property
    def needs_survey(self) -> bool:
        """Whether all clients are asked for sums before an evaluation."""
        return self.samples > 0

    def request_draws(self, round: int, model: Model, batch_size: int) -> dict[str, Draw]:
        """Request the numbers that virtual features are made of.

        Returns:
            Requests by name.
        """
        inner = self.inner.request_draws(round, model, batch_size)
        if not self.needs_survey:
            return inner
        shape = (model.num_classes, self.samples, model.num_features)
        return inner | {"virtual_features": Draw(shape, "survey")}

    def server_init(self, init: FederationInit) -> State:
        """Start with the initial head as the calibrated one."""
        server = self.inner.server_init(init)
        names = init.model.head_names
        if missing := [name for name in names if name not in server["params"]]:
            raise ModelError(
                f"ccvr trains the global head, but the algorithm inside keeps {', '.join(missing)} "
                "at the clients: use one or the other."
            )
        if not self.needs_survey:
            return server
        return server | {"calibrated": {name: server["params"][name] for name in names}}

    def server_model(self, server: State) -> Params:
        """Return the inner model with the calibrated head."""
        weights: Params = self.inner.server_model(server) | server.get("calibrated", {})
        return weights

    def survey(self, weights: Params, batch: Batch, model: Model) -> State:
        """Sum the features of every class, and their products.

        Returns:
            `"num_examples"` `(C,)`, `"feature_sum"` `(C, F)` and `"feature_products"` `(C, F, F)`,
            in float64.
        """
        features = model.features(weights, batch["x"]).double()
        labels = F.one_hot(batch["y"], model.num_classes).double()
        per_class = labels.T[:, :, None] * features
        return {
            "num_examples": labels.sum(0),
            "feature_sum": labels.T @ features,
            "feature_products": per_class.mT @ features,
        }

    def use_survey(self, server: State, total: State, draws: State, model: Model) -> State:
        """Train the head on virtual features.

        Returns:
            The server state with the calibrated head.
        """
        mean, factor = self.moments(total)
        noise = draws["virtual_features"].double()
        features = mean[:, None] + noise @ factor.mT
        is_known = total["num_examples"] > 1
        labels = torch.arange(len(mean), device=mean.device)[:, None].expand(noise.shape[:2])
        weights = self.inner.server_model(server)
        head = {name: weights[name] for name in model.head_names}
        dtype = next(iter(head.values())).dtype
        examples = features[is_known].flatten(0, 1).to(dtype)
        calibrated = train_head(
            model, head, examples, labels[is_known].flatten(), self.steps, self.lr
        )
        return server | {"calibrated": calibrated}

    @staticmethod
    def moments(total: State) -> tuple[Tensor, Tensor]:
        """Compute the distribution of the features of every class.

        Args:
            total: Sums over all clients, as `survey` returns them.

        Returns:
            Means `(C, F)`, and `(C, F, F)`: factors L of the covariances L L^T, to which a
            thousandth of the mean variance is added. No variance is less than that. A class with
            fewer than two examples has no meaning.
        """
        count = total["num_examples"].clamp(min=2)[:, None, None]
        mean = total["feature_sum"] / count[:, 0]
        products = total["feature_products"] - count * mean[:, :, None] * mean[:, None]
        covariance = products / (count - 1)
        variance = covariance.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
        identity = torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
        regular = covariance + RIDGE * variance[:, None, None] * identity
        factor, failed = torch.linalg.cholesky_ex(regular)
        if bool(
            (failed > 0).any() & covariance.isfinite().all()
        ):  # secure aggregation rounds sums: a variance may be negative
            values, vectors = torch.linalg.eigh(regular)
            smallest = RIDGE * variance[:, None]
            factor = vectors * torch.maximum(values, smallest).sqrt()[:, None]
        return mean, factor
