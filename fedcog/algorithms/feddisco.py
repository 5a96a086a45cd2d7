"""FedDisco (Ye et al., ICML 2023, eq. 6): weights by size and label discrepancy of a client."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcog.algorithms.mean_rule import MeanRule
from fedcog.algorithms.payloads import scaled_update
from fedcog.algorithms.types import UPDATE_PARTS, ClientContext, LocalWork
from fedcog.core.settings import setting
from fedcog.core.tree import Params, State


@dataclass(frozen=True)
class FedDisco(MeanRule):
    """Any algorithm, whose server weights clients by max(0, n_k - a d_k + b), normalized.

    n_k is the client's share of the weight of the round's clients, d_k the distance of its label
    distribution from the uniform one; KL divergences are divided by their sum over these clients,
    as in the published code. The server first sums weights and distances and sends the sums back;
    clients then send their weighted updates. So it learns sums only. A round in which all weights
    are 0 leaves the model as it is. Shares shrink as more clients take part: choose smaller a and b
    then.
    """

    implies_fedavg: ClassVar[bool] = True
    single_label_reason: ClassVar[str] = (
        "feddisco compares label distributions, so an example must have exactly one class."
    )
    a: float = setting(0.5, "weight of the label discrepancy; 0 with b 0 is FedAvg", ">= 0")
    b: float = setting(0.1, "added to every client's share", ">= 0")
    distance: Literal["kl", "l1", "l2"] = setting(
        "kl", "distance of label distributions: KL divergence, or the L1 or L2 norm"
    )

    @property
    def payload_bounds(self) -> dict[str, float]:  # type: ignore[override]
        """The inner bounds, those of the discrepancy and of the new weight."""
        return self.inner.payload_bounds | {"discrepancy": 16.0, "disco_weight": 4096.0}

    @property
    def num_resums(self) -> int:
        """The number of further sums: that of the weighted updates."""
        return 1

    @property
    def withheld_parts(self) -> tuple[str, ...]:
        """The update: clients send it once, weighted."""
        return UPDATE_PARTS

    def client_update(
        self, params: Params, client: ClientContext, work: LocalWork
    ) -> tuple[State, State]:
        """Also send the discrepancy of the client's labels.

        Returns:
            (state, payload).
        """
        state, payload = self.inner.client_update(params, client, work)
        discrepancy = self.discrepancy(client.class_counts).to(client.lr.dtype)
        return state, payload | {"discrepancy": discrepancy, "disco_weight": client.weight}

    def discrepancy(self, class_counts: Tensor) -> Tensor:
        """Measure how far a label distribution is from the uniform one.

        Args:
            class_counts: Number of examples of each class, `(C,)`.

        Returns:
            A 0-d tensor.
        """
        share = class_counts.double() / class_counts.sum()
        if self.distance == "kl":
            log_ratio = (share * len(share)).clamp(min=1e-300).log()
            return torch.where(share > 0, share * log_ratio, 0).sum()
        difference = share - 1 / len(share)
        return difference.abs().sum() if self.distance == "l1" else difference.norm()

    def resum_broadcast(self, total: State) -> State:
        """Send the sums of weights and discrepancies."""
        return {key: total[key] for key in ("weight", "discrepancy")}

    def resum_payload(self, payload: State, broadcast: State) -> State:
        """Weight the update by q = max(0, w - a d W / D + b W), which is the rule times W.

        Returns:
            The weighted update and q.
        """
        discrepancy = payload["discrepancy"]
        if self.distance == "kl":
            discrepancy = discrepancy / broadcast["discrepancy"].clamp(min=1e-30)
        correction = self.b - self.a * discrepancy
        weight = (payload["weight"] + correction * broadcast["weight"]).clamp(min=0)
        return scaled_update(weight / payload["weight"], payload) | {"disco_weight": weight}

    def aggregate(self, total: State) -> State:
        """Divide the weighted updates by the sum of their weights."""
        new_weight = total["disco_weight"]
        factor = torch.where(new_weight > 0, total["weight"] / new_weight, 0)
        rest = {key: value for key, value in total.items() if key not in _OWN_KEYS}
        return self.inner.aggregate(rest | scaled_update(factor, total))


_OWN_KEYS = ("discrepancy", "disco_weight")
