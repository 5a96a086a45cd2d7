"""The contract of algorithms, for yours too: `check_algorithm(MyMethod())`."""

from fedcog.testing.contract import (
    CONTRACT,
    FEDCOG,
    PARTIAL,
    active_fedcog_keeps_the_rule,
    check_algorithm,
    neutral_equals_fedavg,
    resume_is_exact,
)
from fedcog.testing.toy_federation import (
    NUM_CLASSES,
    ToyFederation,
    max_difference,
    random_images,
    random_multi_label,
    random_tokens,
    random_vectors,
)

__all__ = [
    "CONTRACT",
    "FEDCOG",
    "NUM_CLASSES",
    "PARTIAL",
    "ToyFederation",
    "active_fedcog_keeps_the_rule",
    "check_algorithm",
    "max_difference",
    "neutral_equals_fedavg",
    "random_images",
    "random_multi_label",
    "random_tokens",
    "random_vectors",
    "resume_is_exact",
]
