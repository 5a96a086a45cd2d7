"""Training that diverged: which setting it is likely to be."""

from fedcog.experiments.config import Experiment, layers, own_settings
from fedcog.federation.rounds import Diverged


def advice(experiment: Experiment, error: Diverged) -> str:
    """Which setting is the likely cause, and what to do about it."""
    if not error.clients:
        name, base = layers(experiment.algorithm)[-1]
        told = ", ".join(f"--{name}.{key.replace('_', '-')} {value}" for key, value in own_settings(base).items())
        return f"The likely cause is the server's step ({told or name}): change its settings."
    rate = experiment.lr * experiment.lr_decay**error.round
    momentum = experiment.momentum if experiment.optimizer == "sgd" else 0.0
    for name, layer in layers(experiment.algorithm):
        for key, curvature in layer.stiffness().items():
            if experiment.optimizer == "sgd" and rate * curvature >= 2 * (1 + momentum):
                flag = f"--{name}.{key.replace('_', '-')}"
                return (
                    f"The likely setting is {flag} {curvature:g}: at lr {rate:g} a step overshoots what it pulls to. "
                    f"Keep it below {2 * (1 + momentum) / rate:g}, or lower --lr, and start anew."
                )
    length = f", {rate / (1 - momentum):g} with momentum" if momentum else ""
    skip = ", or go on with --resume and --on-divergence skip, which leaves such clients out of their round"
    return (
        f"The likely setting is --lr {experiment.lr:g} (a step length of {rate:g}{length}): lower it, or set "
        f"--grad-clip 10, and start anew{skip if experiment.on_divergence == 'stop' else ''}."
    )
