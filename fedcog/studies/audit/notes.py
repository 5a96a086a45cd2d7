"""What the reader of an audit has to know about its attacks, in sentences."""

from fedcog.runs.config.composition import algorithm_name
from fedcog.studies.audit.observation import AuditedRun

NO_PROOF = (
    "An attack that fails proves no privacy: a stronger one may succeed. A bound on what updates "
    "reveal needs differential privacy."
)


def attack_notes(audited: AuditedRun) -> list[str]:
    """Return what the reader of gradient inversion has to know.

    Args:
        audited: The run.

    Returns:
        Sentences.
    """
    return [
        "The attacker is a server that follows the protocol. It knows the network, the parameters "
        "before the round, the optimizer's settings and how many examples to reconstruct.",
        "It divides the change of the parameters by the effective step size and takes that for "
        "the mean gradient before the round. After one SGD step this is exact; after several it "
        "is a model of the update, which weakens the attack.",
        "ReLU and max pooling have no useful second derivatives in many places, which weakens the "
        "attack too. Smooth activations leak more.",
        *_protection_notes(audited),
        *_training_notes(audited),
    ]


def _protection_notes(audited: AuditedRun) -> list[str]:
    """Describe secure aggregation and differential privacy."""
    experiment = audited.experiment
    notes = [
        "One client: what a server sees without secure aggregation. Sum: what it sees with it. "
        "Quantization of secure aggregation is not simulated."
    ]
    if experiment.secure_aggregation:
        notes.append(
            "This run uses secure aggregation: attacks on one client show what a server without "
            "it would see."
        )
    if len(audited.request.client_ids) == 1:
        notes.append("One client takes part in a round, so the sum is that client's update.")
    privacy = audited.prepared.privacy
    if privacy is not None and privacy.noise_at == "central":
        notes.append(
            "This run uses central differential privacy: updates of clients are clipped, and the "
            "sum is noised. The server is trusted with one client's clipped update before noise."
        )
    elif privacy is not None:
        notes.append(
            "This run uses local differential privacy: every update is clipped and noised before "
            "it leaves its client."
        )
    return notes


def _training_notes(audited: AuditedRun) -> list[str]:
    """Describe what of the run's training the attacker ignores."""
    experiment = audited.experiment
    model = audited.prepared.model
    notes = []
    name = algorithm_name(experiment.algorithm)
    if name != "fedavg":
        notes.append(
            f"Clients compute what {name} sends; the attacker assumes the plain loss on real "
            "examples."
        )
    if experiment.optimizer != "sgd":
        notes.append(
            f"The optimizer is {experiment.optimizer}: a step is no multiple of the gradient, "
            "which the attacker ignores."
        )
    if model.uses_dropout:
        notes.append(
            "The attacker simulates the network in evaluation mode, because it does not know the "
            "masks of dropout."
        )
    elif model.batch_norms:
        notes.append(
            "BatchNorm: client and attacker normalize by the statistics of their own batch. The "
            "running statistics that clients send are not used, although they leak too."
        )
    if audited.prepared.data.augmentation is not None:
        notes.append("Originals are shown without your augmentation.")
    return notes
