"""Advice on diverged training: which setting is the likely cause."""

from fedcog.federation.backend import Diverged
from fedcog.runs.config.composition import named_layers
from fedcog.runs.config.experiment import Experiment


def advice(experiment: Experiment, error: Diverged) -> str:
    """Name the setting that is the likely cause, and what to do.

    Args:
        experiment: The experiment.
        error: Where training diverged.

    Returns:
        A sentence or two.
    """
    if not error.client_ids:
        return _server_advice(experiment)
    rate = experiment.lr * experiment.client_lr.factor(error.round)
    momentum = experiment.momentum if experiment.optimizer == "sgd" else 0.0
    if experiment.optimizer == "sgd":
        max_curvature = 2 * (1 + momentum) / rate
        for name, layer in named_layers(experiment.algorithm):
            for key, curvature in layer.penalty_curvature().items():
                if rate * curvature >= 2 * (1 + momentum):
                    flag = f"--{name}.{key.replace('_', '-')}"
                    return (
                        f"The likely cause is {flag} {curvature:g}: at lr {rate:g} a step "
                        f"overshoots the penalty's minimum. Keep it below {max_curvature:g}, or "
                        "lower --lr, and start anew."
                    )
    effective = f", {rate / (1 - momentum):g} with momentum" if momentum else ""
    skip = ""
    if experiment.on_divergence == "stop":
        skip = (
            ", or continue with --resume and --on-divergence skip, which leaves such clients out "
            "of the round"
        )
    return (
        f"The likely cause is --lr {experiment.lr:g} (a step size of {rate:g}{effective}): lower "
        f"it, or set --grad-clip 10, and start anew{skip}."
    )


def _server_advice(experiment: Experiment) -> str:
    """Name the settings of the base algorithm, which decide the server's step."""
    name, base = named_layers(experiment.algorithm)[-1]
    flags = [
        f"--{name}.{key.replace('_', '-')} {value}" for key, value in base.setting_values.items()
    ]
    return (
        f"The likely cause is the server's step ({', '.join(flags) or name}): change its settings."
    )
