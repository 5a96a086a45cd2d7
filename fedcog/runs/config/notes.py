"""Notes on settings of an experiment that have no effect, or that the user may not intend."""

import warnings
from collections.abc import Iterator, Sequence

from fedcog.core import settings
from fedcog.data.partitions.flwr_partitions import FLWR_PARTITIONS
from fedcog.data.partitions.schemes import PARTITIONS
from fedcog.runs.config.composition import named_layers
from fedcog.runs.config.experiment import Experiment

PARTITION_SETTINGS = ("beta", "balance", "classes_per_client")
"""Settings that only some partitions read."""


class SettingWarning(UserWarning):
    """A setting has no effect, or one that the user may not intend."""


def warn_about_settings(experiments: Sequence[Experiment]) -> None:
    """Issue the notes on some experiments as warnings, each once."""
    notes = [note for experiment in experiments for note in experiment_notes(experiment)]
    for note in dict.fromkeys(notes):
        warnings.warn(note, SettingWarning, stacklevel=3)


def experiment_notes(experiment: Experiment) -> list[str]:
    """Return a sentence for each setting that has no effect, or that may not be intended."""
    return [*_unused_settings(experiment), *_inactive_layers(experiment)]


def _unused_settings(experiment: Experiment) -> Iterator[str]:
    """Say which settings have a value other than the default, and are not read."""
    known = settings.settings(Experiment)

    def changed(*names: str) -> list[str]:
        return [name for name in names if getattr(experiment, name) != known[name].default]

    kinds = {experiment.lr_schedule, experiment.server_lr_schedule}
    fading = {"step", "exponential"}
    is_used = {
        "lr_decay": experiment.lr_schedule in fading,
        "server_lr_decay": experiment.server_lr_schedule in fading,
        "lr_step": "step" in kinds,
        "lr_final": bool(kinds & {"cosine", "linear"}),
        "lr_rounds": bool(kinds & {"cosine", "linear"}),
    }
    for name in changed(*is_used):
        if not is_used[name]:
            yield f"{name} has no effect with this learning rate schedule."
    if experiment.optimizer != "sgd" and changed("momentum"):
        yield f"momentum has no effect with --optimizer {experiment.optimizer}."
    if experiment.local_epochs and not experiment.devices and changed("local_steps"):
        yield "local_steps has no effect with --local-epochs."
    if experiment.shift == "none" and changed("shift_strength"):
        yield "shift_strength has no effect without --shift."
    if experiment.weights == "uniform" and changed("weight_cap"):
        yield "weight_cap has no effect with --weights uniform."
    if experiment.privacy == "off" and changed("dp_clip", "dp_noise", "dp_delta"):
        yield "dp_clip, dp_noise and dp_delta have no effect without --privacy central or local."
    if experiment.selection == "uniform" and changed("candidates", "choice_loss"):
        yield "candidates and choice_loss have no effect without --selection power-of-choice."
    if not experiment.async_buffer and changed("async_staleness"):
        yield "async_staleness has no effect without --async-buffer."
    partition = experiment.partition
    if experiment.partition_args and partition not in FLWR_PARTITIONS:
        yield "partition_args has no effect without --partition flwr-shard or flwr-pathological."
    if partition != "auto":
        entry = PARTITIONS.get(partition) or FLWR_PARTITIONS.get(partition)
        read = entry.settings.split() if entry else []
        for name in changed(*PARTITION_SETTINGS):
            if "--" + name.replace("_", "-") not in read:
                yield f"{name} has no effect with --partition {partition}."


def _inactive_layers(experiment: Experiment) -> Iterator[str]:
    """Say which parts of the algorithm stay inactive, or are not evaluated."""
    layers = named_layers(experiment.algorithm)
    for name, layer in layers:
        if layer.is_personalized and not experiment.evaluate_local:
            yield f"{name} trains personal models, but they are not evaluated (--evaluate-local)."
    for name, layer in layers:
        start = getattr(layer, "start_round", 0)
        if start >= experiment.rounds:
            yield (
                f"{name} starts after round {start}, but there are {experiment.rounds} rounds: it "
                "stays inactive (--start-round)."
            )
