"""What must hold for every algorithm, ours or yours: `check_algorithm(MyMethod())`."""

from fedcog.testing.contract import (
    COG,
    CONTRACT,
    PARTIAL,
    awake_fedcog_keeps_its_rule,
    check_algorithm,
    neutral_is_fedavg,
    resumes_bit_for_bit,
)
from fedcog.testing.federation import CLASSES, Small, images, several, vectors, worst

__all__ = [
    "CLASSES",
    "COG",
    "CONTRACT",
    "PARTIAL",
    "Small",
    "awake_fedcog_keeps_its_rule",
    "check_algorithm",
    "images",
    "neutral_is_fedavg",
    "resumes_bit_for_bit",
    "several",
    "vectors",
    "worst",
]
