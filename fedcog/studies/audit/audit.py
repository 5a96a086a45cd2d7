"""The audit of a recorded run: what its updates and its generated inputs reveal."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcog.algorithms import Algorithm
from fedcog.core.settings import ConfigError
from fedcog.runs.config.composition import algorithm_name
from fedcog.runs.config.user_objects import UserObjects
from fedcog.runs.environment import torch_settings
from fedcog.runs.records.provenance import provenance
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.studies.audit.attacks import InversionAttack, attack
from fedcog.studies.audit.federation_state import Measurement
from fedcog.studies.audit.inversion import AttackConfig, LabelAttack
from fedcog.studies.audit.membership import measure_membership, model_membership
from fedcog.studies.audit.notes import NO_PROOF, attack_notes
from fedcog.studies.audit.observation import AuditCase, AuditedRun, open_run, refusal

AUDIT_FORMAT = 1
SMALL_BATCH = 8
"""Number of examples in the case of one step on a batch, at most."""
MAX_GENERATING_CLIENTS = 10
"""Number of clients that generate inputs for the audit, at most."""

OnProgress = Callable[[str, int, int, float], None]
"""Called with (attack, finished iterations, all iterations, cosine cost)."""


@dataclasses.dataclass(frozen=True)
class AuditSettings:
    """How a run is audited.

    Attributes:
        client: The client whose update is attacked; by default the first that the server samples.
        steps: Number of local steps of audited clients, instead of the usual cases.
        examples: Number of examples in a local step, instead of the usual cases.
        iterations: Number of iterations of every attack.
        tv: Weight of the total variation in the attack on images.
        labels: Where the attacker's labels come from: "inferred" or "optimized".
        seed: Seed of the attacks.
        device: Where to compute; by default as the run.
        data_dir: Folder with the data sets; by default as the run.
    """

    client: int | None = None
    steps: int | None = None
    examples: int | None = None
    iterations: int = 1500
    tv: float = 0.01
    labels: LabelAttack = "inferred"
    seed: int = 0
    device: str = ""
    data_dir: str = ""

    def __post_init__(self) -> None:
        """Refuse invalid settings.

        Raises:
            ConfigError: If there are any; it lists all.
        """
        faults = []
        for name in ("steps", "examples", "iterations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name} needs an integer >= 1, not {value}.")
        if not (self.tv >= 0 and math.isfinite(self.tv)):
            faults.append(f"tv needs a number >= 0, not {self.tv:g}.")
        if self.seed < 0:
            faults.append(f"seed needs an integer >= 0, not {self.seed}.")
        if self.labels not in ("inferred", "optimized"):
            faults.append(f"labels needs 'inferred' or 'optimized', not {self.labels!r}.")
        if faults:
            raise ConfigError(faults)


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        run: The run directory.
        about: Algorithm, data set, network and round.
        settings: How the run was audited.
        membership: Membership inference: the AUC of the model's loss and, with FedCOG, distances of
            generated inputs to training inputs. `"note"` says what does not apply.
        attacks: Gradient inversion, one entry per case and target.
        inversion_note: Why there is no gradient inversion; empty if there is.
        notes: What the reader has to know.
        provenance: Command, versions, machine and commit.
    """

    run: Path
    about: dict[str, Any]
    settings: dict[str, Any]
    membership: Measurement
    attacks: list[InversionAttack]
    inversion_note: str
    notes: list[str]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of audit.json."""
        return {
            "format": AUDIT_FORMAT,
            "about": self.about,
            "settings": self.settings,
            "membership": self.membership,
            "inversion": {
                "note": self.inversion_note,
                "attacks": [attack.to_dict() for attack in self.attacks],
            },
            "notes": self.notes,
            "provenance": self.provenance,
        }


def audit_run(
    path: str | Path,
    settings: AuditSettings,
    objects: UserObjects,
    algorithm: Algorithm | None = None,
    *,
    command: str | None = None,
    on_progress: OnProgress | None = None,
) -> Audit:
    """Audit a recorded run; nothing is written.

    Args:
        path: The run directory.
        settings: How to audit it.
        objects: Objects of the user that the run used.
        algorithm: The user's algorithm, if the run used one.
        command: The command line to record.
        on_progress: Called while attacks run.

    Returns:
        The audit.

    Raises:
        RecordError: If there is no run or no checkpoint, or data or network are not the run's.
        ConfigError: If the client is unknown, or something that the run needs is missing.
    """
    names = ("device", "data_dir")
    changes = {name: getattr(settings, name) for name in names if getattr(settings, name)}
    with torch_settings(RunDirectory(path).experiment()):
        audited = open_run(path, objects, algorithm, settings.client, **changes)
        try:
            return _audit(audited, settings, command, on_progress or _ignore)
        finally:
            audited.prepared.simulator.cohort.close()


def _audit(
    audited: AuditedRun, settings: AuditSettings, command: str | None, on_progress: OnProgress
) -> Audit:
    prepared = audited.prepared
    on_progress("membership inference", 0, 0, math.nan)
    membership = _membership(audited)
    reason = refusal(audited)
    attacks = [] if reason else _attacks(audited, settings, on_progress)
    values = dataclasses.asdict(settings)
    for name in ("device", "data_dir"):
        del values[name]
    return Audit(
        run=audited.directory.path,
        about={
            "algorithm": algorithm_name(audited.experiment.algorithm),
            "dataset": prepared.dataset.name,
            "model": prepared.model_name,
            "seed": audited.experiment.seed,
            "round": audited.checkpoint.round,
            "rounds": audited.experiment.rounds,
            "clients": audited.request.client_ids,
            "precision": audited.experiment.precision,
        },
        settings=values | {"client": audited.client},
        membership=membership,
        attacks=attacks,
        inversion_note=reason,
        notes=[*audited.notes, *([] if reason else attack_notes(audited)), NO_PROOF],
        provenance=provenance(command, prepared.device),
    )


def _ignore(attack: str, done: int, total: int, cost: float) -> None:
    """Show no progress."""


def _membership(audited: AuditedRun) -> Measurement:
    """Return what membership inference finds, with a note on what does not apply."""
    prepared = audited.prepared
    if prepared.task.multi_label:
        return {"note": "Membership inference covers examples with one label each, not several."}
    if not len(prepared.data.test_y):
        return {"note": "Membership inference needs test examples, and this run has none."}
    if reason := _no_generated_inputs(audited):
        return {"note": reason} | model_membership(audited.state)
    client_ids = audited.request.client_ids[:MAX_GENERATING_CLIENTS]
    return measure_membership(audited.state, client_ids)


def _no_generated_inputs(audited: AuditedRun) -> str:
    """Return why no generated inputs are examined; empty if they are."""
    algorithm = audited.experiment.algorithm
    start = algorithm.generation_start
    if start is None:
        return (
            f"{algorithm_name(algorithm)} generates no inputs: the part about inputs that clients "
            "generate (FedCOG) does not apply."
        )
    if algorithm.class_name != "FedCOG" or algorithm.generator_config.kind != "none":
        return "Generated inputs are examined only if FedCOG is outermost and has no generator."
    if "asked" not in algorithm.request_draws(audited.state.round, audited.prepared.model, 1):
        return f"FedCOG generates no inputs in round {audited.state.round + 1}."
    if audited.prepared.model.continuous_shape != audited.prepared.model.input_shape:
        return "Generated inputs are embeddings here, which are not compared with tokens."
    return ""


def _attacks(
    audited: AuditedRun, settings: AuditSettings, on_progress: OnProgress
) -> list[InversionAttack]:
    """Attack one client's update and the sum of the round's updates, in every case."""
    cases = _cases(audited, settings)
    targets = [[audited.client], audited.request.client_ids]
    total = len(cases) * len(targets) * settings.iterations
    config = AttackConfig(
        settings.iterations, tv=settings.tv, labels=settings.labels, seed=settings.seed
    )
    attacks: list[InversionAttack] = []
    for case in cases:
        for target, client_ids in zip(("client", "sum"), targets, strict=True):
            name = _case_name(audited, case)
            title = f"{name}, {target}"
            done = len(attacks) * settings.iterations
            on_progress(title, done, total, math.nan)

            def _show(step: int, cost: float, title: str = title, done: int = done) -> None:
                on_progress(title, done + step, total, cost)

            empty = InversionAttack(name, target, len(client_ids))
            attacks.append(attack(audited, case, client_ids, config, empty, _show))
            on_progress(title, done + settings.iterations, total, math.nan)
    return attacks


def _cases(audited: AuditedRun, settings: AuditSettings) -> list[AuditCase]:
    """Return the cases: one step on one example, one step on a batch, and the run's own work."""
    if settings.steps is not None or settings.examples is not None:
        return [AuditCase(settings.steps, settings.examples)]
    batch = min(audited.experiment.batch_size, SMALL_BATCH)
    return list(dict.fromkeys([AuditCase(1, 1), AuditCase(1, batch), AuditCase()]))


def _case_name(audited: AuditedRun, case: AuditCase) -> str:
    """Describe a case in words."""
    steps = case.steps or int(audited.prepared.simulator.num_steps[audited.client])
    examples = case.examples or audited.experiment.batch_size
    name = f"{steps} step{'s' * (steps > 1)}, {examples} example{'s' * (examples > 1)}"
    return f"{name} (as in the run)" if case == AuditCase() else name
