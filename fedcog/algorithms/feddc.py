"""FedDC (Gao et al., CVPR 2022, algorithm 1): local drift that is decoupled and corrected."""

from dataclasses import dataclass

from fedcog.algorithms.feddyn import FedDyn
from fedcog.algorithms.scaffold import SCAFFOLD


@dataclass(frozen=True)
class FedDC(FedDyn, SCAFFOLD):
    """FedDyn and SCAFFOLD together: local steps along g - c_k + c + alpha (theta - G + h_k).

    h_k is the sum of the client's updates, its drift; the server adds the mean of all h_k, as
    FedDyn here does: by weight within a round. That is FedDyn's memory with the other sign, so the
    method is both classes and nothing else. As in SCAFFOLD here, c_k is derived with the effective
    step size; the authors divide by the undecayed learning rate times the number of steps.
    """
