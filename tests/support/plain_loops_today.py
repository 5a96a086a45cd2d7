"""More methods as plain loops over tensors, in the notation of `plain_loops.py`.

Nothing here imports `fedcog` either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.plain_loops import (
    BODY,
    HEAD,
    Params,
    add,
    cross_entropy,
    effective_steps,
    features,
    grad,
    head,
    inner,
    leaves,
    local_sgd,
    log_softmax,
    mean_of,
    minus,
    risk_grad,
    sgd,
    zeros,
)

if TYPE_CHECKING:
    from tests.support.plain_case import Case

Direction = Callable[[Params, Tensor, Tensor], Params]
"""The direction of a local step at y, from a batch's inputs and labels."""

Sent = dict[int, Params]
"""What clients sent, by client."""


# --- shared functions


def train(case: Case, x: Params, r: int, client: int, direction: Direction) -> Params:
    """Return the client's model after local steps along a direction of its own."""
    y = dict(x)
    buffer = zeros(x)
    for data, labels in case.batches(r, client):
        sgd(case, y, buffer, direction(y, data, labels))
    return y


def logits_of(p: Params, data: Tensor) -> Tensor:
    return head(p, features(p, data))


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) of one example, from logits (C,)."""
    p = torch.exp(teacher - torch.logsumexp(teacher, 0))
    q_log = student - torch.logsumexp(student, 0)
    p_log = teacher - torch.logsumexp(teacher, 0)
    return (p * (p_log - q_log)).sum()


def mean_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence of a batch of logits (N, C)."""
    terms = [
        kl(one / temperature, other / temperature)
        for one, other in zip(teacher, student, strict=True)
    ]
    return torch.stack(terms).mean()


def norm(v: Params) -> Tensor:
    return inner(v, v).sqrt()


# --- losses for label skew


def with_loss(
    case: Case, loss_of: Callable[[Params, Params, int, Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Run FedAvg whose clients minimize loss_of(p, x, client, data, labels)."""
    x = case.params
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            start = dict(x)

            def direction(
                y: Params, data: Tensor, labels: Tensor, start: Params = start, i: int = i
            ) -> Params:
                p = leaves(y)
                return grad(loss_of(p, start, i, data, labels), p)

            sent[i] = minus(train(case, x, r, i, direction), x)
        x = add(x, mean_of(case, sent))
    return {"params": x}


def weighted_softmax_loss(logits: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    """Return -log of f_y e^(z_y) / sum_c f_c e^(z_c), averaged over a batch."""
    terms = []
    for z, label in zip(logits, labels.tolist(), strict=True):
        total = torch.stack([factors[c] * torch.exp(z[c]) for c in range(len(z))]).sum()
        terms.append(torch.log(total) - torch.log(factors[label]) - z[label])
    return torch.stack(terms).mean()


def balanced_loss(
    logits: Tensor, labels: Tensor, counts: Tensor, strength: float, smoothing: float
) -> Tensor:
    return weighted_softmax_loss(logits, labels, (counts.double() + smoothing) ** strength)


def balanced_softmax(case: Case, strength: float, smoothing: float) -> dict[str, Any]:
    def loss_of(p: Params, x: Params, i: int, data: Tensor, labels: Tensor) -> Tensor:
        return balanced_loss(logits_of(p, data), labels, case.counts(i), strength, smoothing)

    return with_loss(case, loss_of)


def fedlc_factors(counts: Tensor, tau: float) -> Tensor:
    """Return e^(-tau / n_c^(1/4)), and 0 for a class without examples."""
    factors = [math.exp(-tau / n**0.25) if n else 0.0 for n in counts.tolist()]
    return torch.tensor(factors, dtype=torch.float64)


def fedlc_loss(p: Params, case: Case, i: int, data: Tensor, labels: Tensor, tau: float) -> Tensor:
    return weighted_softmax_loss(logits_of(p, data), labels, fedlc_factors(case.counts(i), tau))


def fedlc(case: Case, tau: float) -> dict[str, Any]:
    return with_loss(case, lambda p, x, i, data, labels: fedlc_loss(p, case, i, data, labels, tau))


def fedrs(case: Case, alpha: float, rule: str) -> dict[str, Any]:
    def loss_of(p: Params, x: Params, i: int, data: Tensor, labels: Tensor) -> Tensor:
        counts = case.counts(i).tolist()
        if rule == "hard":
            a = [1.0 if n > 0 else alpha for n in counts]
        elif rule == "soft":
            a = [alpha + (1 - alpha) * n / max(counts) for n in counts]
        else:
            raise ValueError(rule)
        return cross_entropy(logits_of(p, data) * torch.tensor(a, dtype=torch.float64), labels)

    return with_loss(case, loss_of)


def fedntd(case: Case, beta: float, temperature: float) -> dict[str, Any]:
    def loss_of(p: Params, x: Params, i: int, data: Tensor, labels: Tensor) -> Tensor:
        z = logits_of(p, data)
        z_global = logits_of(x, data)
        terms = []
        for k, label in enumerate(labels.tolist()):
            wrong = [c for c in range(case.classes) if c != label]
            terms.append(kl(z_global[k, wrong] / temperature, z[k, wrong] / temperature))
        return cross_entropy(z, labels) + beta * temperature**2 * torch.stack(terms).mean()

    return with_loss(case, loss_of)


def suppression_term(z: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Return sum_c p_c log mean e^(z'_c), z'_c calibrated, and 0 where class c is true."""
    num_classes = len(counts)
    p = counts.double() / counts.sum()
    total = z.sum() * 0
    for c in range(num_classes):
        calibrated = z[:, c] - torch.log(p[c] + 1e-9) + math.log(1 / num_classes)
        parts = [
            torch.exp(calibrated[k]) if label != c else torch.ones_like(calibrated[k])
            for k, label in enumerate(labels.tolist())
        ]
        total = total + p[c] * torch.log(torch.stack(parts).mean())
    return total


def fedvls(
    case: Case, strength: float, smoothing: float, lambda_vacant: float, suppression: float
) -> dict[str, Any]:
    def loss_of(p: Params, x: Params, i: int, data: Tensor, labels: Tensor) -> Tensor:
        counts = case.counts(i)
        z = logits_of(p, data)
        z_global = logits_of(x, data)
        loss = balanced_loss(z, labels, counts, strength, smoothing)
        absent = [c for c, n in enumerate(counts.tolist()) if n == 0]
        if len(absent) > 1:
            loss = loss + lambda_vacant * mean_kl(z_global[:, absent], z[:, absent], 1.0)
        return loss + suppression * suppression_term(z, labels, counts)

    return with_loss(case, loss_of)


def lacking_variance(logits: Tensor) -> Tensor:
    """Return mean_c max(0, 1 / sqrt(C) - std of the predicted probability of c)."""
    n, num_classes = logits.shape
    p = torch.exp(log_softmax(logits))
    terms = []
    for c in range(num_classes):
        mean = p[:, c].sum() / n
        std = (((p[:, c] - mean) ** 2).sum() / (n - 1)).sqrt()
        terms.append(torch.clamp(1 / math.sqrt(num_classes) - std, min=0))
    return torch.stack(terms).mean()


def crowding(z: Tensor, data: Tensor) -> Tensor:
    """Return mean e^(-d / s) over pairs; s is the lower median of the distances above 0.

    Examples that are equal count as at distance 0, whatever rounding makes of their features.
    """
    pairs = [(j, k) for j in range(len(z)) for k in range(j + 1, len(z))]
    distances = [((z[j] - z[k]) ** 2).sum() for j, k in pairs]
    apart = [not torch.equal(data[j], data[k]) for j, k in pairs]
    positive = [d for d, is_apart in zip(distances, apart, strict=True) if is_apart]
    positive.sort(key=lambda d: float(d.detach()))
    s = positive[(len(positive) - 1) // 2]
    return torch.stack([torch.exp(-d / s) for d in distances]).mean()


def feduv(case: Case, variance: float, uniformity: float) -> dict[str, Any]:
    def loss_of(p: Params, x: Params, i: int, data: Tensor, labels: Tensor) -> Tensor:
        z = features(p, data)
        logits = head(p, z)
        penalty = variance * lacking_variance(logits) + uniformity * crowding(z, data)
        return cross_entropy(logits, labels) + penalty

    return with_loss(case, loss_of)


def fedgkd(case: Case, gamma: float, temperature: float, models: int) -> dict[str, Any]:
    x = case.params
    past = [x]
    for r in range(case.rounds):
        last = past[-models:]
        teacher = {name: torch.stack([one[name] for one in last]).mean(0) for name in x}

        def direction(y: Params, data: Tensor, labels: Tensor, teacher: Params = teacher) -> Params:
            p = leaves(y)
            z = logits_of(p, data)
            distillation = mean_kl(logits_of(teacher, data), z, temperature)
            return grad(cross_entropy(z, labels) + gamma * temperature**2 * distillation, p)

        sent = {i: minus(train(case, x, r, i, direction), x) for i in case.sampled(r)}
        x = add(x, mean_of(case, sent))
        past.append(x)
    if models == 1:
        return {"params": x}
    history = {name: torch.stack([one[name] for one in past[-models:-1]]) for name in x}
    return {"params": x, "history": history}


# --- local gradients and global momentum


def fedacg(
    case: Case,
    beta: float,
    mu: float,
    loss_of: Callable[[Params, int, Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    x = case.params
    v = zeros(x)
    for r in range(case.rounds):
        ahead = add(x, v, beta)
        sent = {}
        for i in case.sampled(r):

            def direction(
                y: Params, data: Tensor, labels: Tensor, ahead: Params = ahead, i: int = i
            ) -> Params:
                p = leaves(y)
                if loss_of is None:
                    g = risk_grad(y, data, labels)
                else:
                    g = grad(loss_of(p, i, data, labels), p)
                return add(g, minus(y, ahead), 2 * mu)

            sent[i] = minus(train(case, ahead, r, i, direction), ahead)
        mean = mean_of(case, sent)
        v = {name: beta * v[name] + mean[name] for name in v}
        x = add(ahead, mean)
    return {"params": x, "velocity": v}


def fedlc_fedacg(case: Case, tau: float, beta: float, mu: float) -> dict[str, Any]:
    return fedacg(
        case, beta, mu, lambda p, i, data, labels: fedlc_loss(p, case, i, data, labels, tau)
    )


def fedcm(case: Case, alpha: float) -> dict[str, Any]:
    x = case.params
    direction_of_all = zeros(x)
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):

            def direction(
                y: Params, data: Tensor, labels: Tensor, v: Params = direction_of_all
            ) -> Params:
                g = risk_grad(y, data, labels)
                return {name: alpha * g[name] + (1 - alpha) * v[name] for name in y}

            sent[i] = minus(train(case, x, r, i, direction), x)
        mean = mean_of(case, sent)
        lengths = {i: case.lr * effective_steps(case.num_steps(i), case.momentum) for i in sent}
        total = sum(case.weight(i) for i in sent)
        length = sum(case.weight(i) * lengths[i] for i in sent) / total
        direction_of_all = {name: -mean[name] / length for name in mean}
        x = add(x, mean)
    return {"params": x, "direction": direction_of_all}


def feddc(case: Case, alpha: float, correction: float, strength: float) -> dict[str, Any]:
    """Compute FedDC with the drift h_i; fedcog stores -h_i as FedDyn's memory."""
    x = case.params
    h_mean = zeros(x)
    c = zeros(x)
    drifts: dict[int, Params] = {}
    controls: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        changes = {}
        for i in case.sampled(r):
            h = drifts.get(i, zeros(x))
            control = controls.get(i, zeros(x))
            linear = {name: strength * (c[name] - control[name]) for name in x}

            def direction(
                y: Params,
                data: Tensor,
                labels: Tensor,
                x: Params = x,
                h: Params = h,
                linear: Params = linear,
            ) -> Params:
                g = risk_grad(y, data, labels)
                return {
                    name: g[name] + linear[name] + alpha * (y[name] - x[name] + h[name])
                    for name in y
                }

            y = train(case, x, r, i, direction)
            length = case.lr * effective_steps(case.num_steps(i), case.momentum)
            sent[i] = minus(y, x)
            drifts[i] = add(h, sent[i])
            controls[i] = {name: -linear[name] - sent[i][name] / length for name in x}
            changes[i] = minus(controls[i], control)
        mean = mean_of(case, sent)
        h_mean = add(h_mean, mean, len(sent) / len(case.sizes))
        for change in changes.values():
            c = add(c, change, 1 / len(case.sizes))
        x = {name: x[name] + mean[name] + correction * h_mean[name] for name in x}
    return {
        "params": x,
        "control": c,
        "controls": controls,
        "h": {name: -value for name, value in h_mean.items()},
        "memories": {i: {name: -v for name, v in h.items()} for i, h in drifts.items()},
    }


def fedspeed(case: Case, alpha: float, correction: float, rho: float, mix: float) -> dict[str, Any]:
    x = case.params
    h_mean = zeros(x)
    drifts: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            h = drifts.get(i, zeros(x))

            def direction(
                y: Params, data: Tensor, labels: Tensor, x: Params = x, h: Params = h
            ) -> Params:
                g1 = risk_grad(y, data, labels)
                g2 = risk_grad(add(y, g1, rho / norm(g1)), data, labels)
                mixed = {name: (1 - mix) * g1[name] + mix * g2[name] for name in y}
                return {name: mixed[name] + alpha * (y[name] - x[name] + h[name]) for name in y}

            sent[i] = minus(train(case, x, r, i, direction), x)
            drifts[i] = add(h, sent[i])
        mean = mean_of(case, sent)
        h_mean = add(h_mean, mean, len(sent) / len(case.sizes))
        x = {name: x[name] + mean[name] + correction * h_mean[name] for name in x}
    return {
        "params": x,
        "h": {name: -value for name, value in h_mean.items()},
        "memories": {i: {name: -v for name, v in h.items()} for i, h in drifts.items()},
    }


def lesam_perturbation(x: Params, old: Params, rho: float) -> Params:
    """Return rho (old - x) / |old - x|, and 0 for a client that takes part for the first time."""
    change = minus(old, x)
    length = norm(change)
    if length == 0:
        return zeros(x)
    return {name: rho * value / length for name, value in change.items()}


def fedlesam(case: Case, rho: float) -> dict[str, Any]:
    x = case.params
    received: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            e = lesam_perturbation(x, received.get(i, x), rho)

            def direction(y: Params, data: Tensor, labels: Tensor, e: Params = e) -> Params:
                return risk_grad(add(y, e), data, labels)

            sent[i] = minus(train(case, x, r, i, direction), x)
            received[i] = x
        x = add(x, mean_of(case, sent))
    return {"params": x, "received": received}


def scaffold_fedlesam(case: Case, rho: float, strength: float) -> dict[str, Any]:
    x = case.params
    c = zeros(x)
    controls: dict[int, Params] = {}
    received: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        changes = {}
        for i in case.sampled(r):
            e = lesam_perturbation(x, received.get(i, x), rho)
            control = controls.get(i, zeros(x))
            linear = {name: strength * (c[name] - control[name]) for name in x}

            def direction(
                y: Params, data: Tensor, labels: Tensor, e: Params = e, linear: Params = linear
            ) -> Params:
                return add(risk_grad(add(y, e), data, labels), linear)

            sent[i] = minus(train(case, x, r, i, direction), x)
            length = case.lr * effective_steps(case.num_steps(i), case.momentum)
            controls[i] = {name: -linear[name] - sent[i][name] / length for name in x}
            changes[i] = minus(controls[i], control)
            received[i] = x
        x = add(x, mean_of(case, sent))
        for change in changes.values():
            c = add(c, change, 1 / len(case.sizes))
    return {"params": x, "control": c, "controls": controls, "received": received}


def unit_columns(value: Tensor) -> Tensor:
    """Divide by the L2 norm along the first dimension; zeros stay."""
    lengths = (value * value).sum(0, keepdim=True).sqrt()
    return torch.where(lengths > 0, value / lengths, torch.zeros_like(value))


def sol_perturbation(y: Params, x: Params, r: Params, rho: float, scaling: str) -> Params:
    length = norm(r)
    if scaling == "adaptive":
        scale = {name: unit_columns((y[name] - x[name]).abs()) for name in y}
    elif scaling == "fixed":
        scale = {name: torch.ones_like(value) for name, value in y.items()}
    else:
        raise ValueError(scaling)
    if length < 1e-6:
        return zeros(y)
    return {name: rho * scale[name] * r[name] / length for name in y}


def fedsol(case: Case, rho: float, temperature: float, scaling: str) -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):

        def direction(y: Params, data: Tensor, labels: Tensor, x: Params = x) -> Params:
            p = leaves(y)
            toward = grad(mean_kl(logits_of(x, data), logits_of(p, data), temperature), p)
            e = sol_perturbation(y, x, toward, rho, scaling)
            return risk_grad(add(y, e), data, labels)

        sent = {i: minus(train(case, x, r, i, direction), x) for i in case.sampled(r)}
        x = add(x, mean_of(case, sent))
    return {"params": x}


# --- the server


def disco_weights(
    weights: dict[int, float], counts: dict[int, Tensor], a: float, b: float, distance: str
) -> dict[int, float]:
    """Return max(0, share - a d + b), not yet normalized."""
    d = {}
    for i, n in counts.items():
        p = [float(value) / float(n.sum()) for value in n]
        uniform = 1 / len(p)
        if distance == "kl":
            d[i] = sum(q * math.log(q / uniform) for q in p if q > 0)
        elif distance == "l1":
            d[i] = sum(abs(q - uniform) for q in p)
        elif distance == "l2":
            d[i] = math.sqrt(sum((q - uniform) ** 2 for q in p))
        else:
            raise ValueError(distance)
    if distance == "kl":
        total = sum(d.values())
        d = {i: value / total for i, value in d.items()}
    num_examples = sum(weights.values())
    return {i: max(0.0, weights[i] / num_examples - a * d[i] + b) for i in weights}


def disco_mean(case: Case, sent: Sent, a: float, b: float, distance: str) -> Params:
    weights = {i: case.weight(i) for i in sent}
    counts = {i: case.counts(i) for i in sent}
    q = disco_weights(weights, counts, a, b, distance)
    mean = zeros(case.params)
    if sum(q.values()) == 0:
        return mean
    for i in sent:
        mean = add(mean, sent[i], q[i] / sum(q.values()))
    return mean


def feddisco(case: Case, a: float, b: float, distance: str) -> dict[str, Any]:
    return with_mean(case, lambda sent: disco_mean(case, sent, a, b, distance))


def prox_updates(case: Case, x: Params, r: int, mu: float) -> Sent:
    def direction(y: Params, data: Tensor, labels: Tensor) -> Params:
        return add(risk_grad(y, data, labels), minus(y, x), mu)

    return {i: minus(train(case, x, r, i, direction), x) for i in case.sampled(r)}


def server_momentum(
    case: Case,
    updates: Callable[[Params, int], Sent],
    mean: Callable[[Sent], Params],
    beta: float,
) -> dict[str, Any]:
    x = case.params
    v = zeros(x)
    for r in range(case.rounds):
        change = mean(updates(x, r))
        v = {name: beta * v[name] + change[name] for name in v}
        x = add(x, v)
    return {"params": x, "velocity": v}


def fedprox_fedavgm(case: Case, mu: float, beta: float, variant: str) -> dict[str, Any]:
    assert variant == "plain"
    return server_momentum(
        case,
        lambda x, r: prox_updates(case, x, r, mu),
        lambda sent: mean_of(case, sent),
        beta,
    )


def fedprox_feddisco_fedavgm(
    case: Case, mu: float, a: float, b: float, distance: str, beta: float, variant: str
) -> dict[str, Any]:
    assert variant == "plain"
    return server_momentum(
        case,
        lambda x, r: prox_updates(case, x, r, mu),
        lambda sent: disco_mean(case, sent, a, b, distance),
        beta,
    )


def scaffold_fedadam(
    case: Case,
    strength: float,
    rule: str,
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> dict[str, Any]:
    assert rule == "adam"
    x = case.params
    m = zeros(x)
    v = {name: torch.full_like(value, tau**2) for name, value in x.items()}
    c = zeros(x)
    controls: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        changes = {}
        for i in case.sampled(r):
            control = controls.get(i, zeros(x))
            linear = {name: strength * (c[name] - control[name]) for name in x}

            def direction(
                y: Params, data: Tensor, labels: Tensor, linear: Params = linear
            ) -> Params:
                return add(risk_grad(y, data, labels), linear)

            sent[i] = minus(train(case, x, r, i, direction), x)
            length = case.lr * effective_steps(case.num_steps(i), case.momentum)
            controls[i] = {name: -linear[name] - sent[i][name] / length for name in x}
            changes[i] = minus(controls[i], control)
        mean = mean_of(case, sent)
        for name in x:
            m[name] = beta1 * m[name] + (1 - beta1) * mean[name]
            v[name] = beta2 * v[name] + (1 - beta2) * mean[name] ** 2
        x = {name: x[name] + lr * m[name] / (v[name].sqrt() + tau) for name in x}
        for change in changes.values():
            c = add(c, change, 1 / len(case.sizes))
    return {"params": x, "m": m, "control": c, "controls": controls}


def pooled_moments(p: Params, data: Tensor, labels: Tensor, label: int) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased covariance of the features of one class."""
    z = features(p, data)[labels == label]
    return z.mean(0), torch.cov(z.T)


def ccvr(case: Case, samples: int, steps: int, lr: float) -> dict[str, Any]:
    """Run FedAvg; after the last round train its head on normally distributed features."""
    x = fedavg_model(case)
    width = x["2.weight"].shape[1]
    shape = (case.classes, samples, width)
    noise = case.normal("virtual_features", shape, case.rounds - 1, 0)
    everything = [case.own_examples(i) for i in range(len(case.sizes))]
    data = torch.cat([one for one, _ in everything])
    labels = torch.cat([one for _, one in everything])
    virtual = []
    targets = []
    for c in range(case.classes):
        if (labels == c).sum() < 2:
            continue
        mean, covariance = pooled_moments(x, data, labels, c)
        ridge = 0.001 * covariance.diagonal().mean()
        factor = torch.linalg.cholesky(covariance + ridge * torch.eye(width).double())
        virtual.append(torch.stack([mean + factor @ one for one in noise[c]]))
        targets.append(torch.full((samples,), c))
    z = torch.cat(virtual)
    y = torch.cat(targets)
    p = leaves({name: x[name] for name in HEAD})
    optimizer = torch.optim.Adam(list(p.values()), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(head(p, z), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"params": x, "calibrated": {name: p[name].detach() for name in HEAD}}


def fedavg_model(case: Case) -> Params:
    params: Params = with_mean(case, lambda sent: mean_of(case, sent))["params"]
    return params


# --- personalized methods


def fedper(case: Case) -> dict[str, Any]:
    start = case.params
    body = {name: start[name] for name in BODY}
    heads: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            own = heads.get(i, {name: start[name] for name in HEAD})
            y = train(case, body | own, r, i, risk_grad)
            sent[i] = {name: y[name] - body[name] for name in BODY}
            heads[i] = {name: y[name] for name in HEAD}
        body = add(body, mean_of(case, sent))
    return {"params": body, "heads": heads}


def fedbabu(case: Case) -> dict[str, Any]:
    x = case.params
    fixed = {name: x[name] for name in HEAD}
    body = {name: x[name] for name in BODY}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):

            def direction(y: Params, data: Tensor, labels: Tensor) -> Params:
                p = leaves(y)
                return grad(cross_entropy(head(fixed, features(p, data)), labels), p)

            sent[i] = minus(train(case, body, r, i, direction), body)
        body = add(body, mean_of(case, sent))
    return {"params": body}


# --- robust rules for the mean


def with_mean(case: Case, mean: Callable[[Sent], Params]) -> dict[str, Any]:
    """Run FedAvg with another mean of the clients' updates."""
    x = case.params
    for r in range(case.rounds):
        x = add(x, mean({i: local_sgd(case, x, r, i) for i in case.sampled(r)}))
    return {"params": x}


def sorted_values(sent: Sent, name: str) -> Tensor:
    """Return the clients' values of every number in ascending order, (K, ...)."""
    return torch.stack([update[name] for update in sent.values()]).sort(0).values


def median_of(sent: Sent) -> Params:
    k = len(sent)
    result = {}
    for name in next(iter(sent.values())):
        values = sorted_values(sent, name)
        result[name] = (values[(k - 1) // 2] + values[k // 2]) / 2
    return result


def median(case: Case) -> dict[str, Any]:
    return with_mean(case, median_of)


def trimmed_mean(case: Case, trim: int) -> dict[str, Any]:
    def mean(sent: Sent) -> Params:
        return {
            name: sorted_values(sent, name)[trim : len(sent) - trim].mean(0) for name in case.params
        }

    return with_mean(case, mean)


def krum_order(sent: Sent, attackers: int) -> list[int]:
    """Return the clients from the lowest score to the highest."""
    scores = {}
    for i in sent:
        differences = [minus(sent[i], sent[j]) for j in sent if j != i]
        squares = sorted(float(inner(d, d)) for d in differences)
        scores[i] = sum(squares[: len(sent) - attackers - 2])
    return sorted(sent, key=lambda i: scores[i])


def krum(case: Case, attackers: int) -> dict[str, Any]:
    return with_mean(case, lambda sent: sent[krum_order(sent, attackers)[0]])


def multi_krum(case: Case, attackers: int, keep: int) -> dict[str, Any]:
    def mean(sent: Sent) -> Params:
        number = keep or len(sent) - attackers
        return mean_of(case, {i: sent[i] for i in krum_order(sent, attackers)[:number]})

    return with_mean(case, mean)


def krum_fedavgm(case: Case, attackers: int, beta: float, variant: str) -> dict[str, Any]:
    assert variant == "plain"
    return server_momentum(
        case,
        lambda x, r: {i: local_sgd(case, x, r, i) for i in case.sampled(r)},
        lambda sent: sent[krum_order(sent, attackers)[0]],
        beta,
    )


def weiszfeld(points: Sent, weights: dict[int, float], passes: int, epsilon: float) -> Params:
    """Return the smoothed geometric median after some passes from the weighted mean."""
    shares = dict(weights)
    for _ in range(passes + 1):
        total = sum(shares.values())
        v = zeros(next(iter(points.values())))
        for i, point in points.items():
            v = add(v, point, shares[i] / total)
        shares = {
            i: weights[i] / max(epsilon, float(norm(minus(v, point))))
            for i, point in points.items()
        }
    return v


def geometric_median(case: Case, passes: int, epsilon: float) -> dict[str, Any]:
    def mean(sent: Sent) -> Params:
        return weiszfeld(sent, {i: case.weight(i) for i in sent}, passes, epsilon)

    return with_mean(case, mean)
