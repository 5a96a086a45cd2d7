"""Every method as plain loops over tensors: an independent reference for `fedcog.algorithms`.

Nothing here imports `fedcog`; each function follows the algorithm box of its paper. x is the global
model at the start of a round, y a client's local model, y - x its update. Parameters are dicts of
float64 tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.plain_case import Case

Params = dict[str, Tensor]
HEAD = ("2.weight", "2.bias")
BODY = ("0.weight", "0.bias")


# --- shared functions


def features(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["0.weight"].T + p["0.bias"])


def head(p: Params, z: Tensor) -> Tensor:
    """Return the logits of features; those of virtual classes, if any, come last."""
    logits = z @ p["2.weight"].T + p["2.bias"]
    if ".virtual.weight" in p:
        logits = torch.cat([logits, z @ p[".virtual.weight"].T + p[".virtual.bias"]], 1)
    return logits


def log_softmax(logits: Tensor) -> Tensor:
    return logits - torch.logsumexp(logits, 1, keepdim=True)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each example, shape (N,)."""
    return -log_softmax(logits)[torch.arange(len(labels)), labels]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropies(logits, labels).mean()


def risk(p: Params, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(head(p, features(p, x)), labels)


def leaves(at: Params) -> Params:
    """Return copies that require gradients."""
    return {name: value.detach().clone().requires_grad_() for name, value in at.items()}


def grad(loss: Tensor, p: Params) -> Params:
    return dict(zip(p, torch.autograd.grad(loss, list(p.values())), strict=True))


def risk_grad(at: Params, x: Tensor, labels: Tensor) -> Params:
    p = leaves(at)
    return grad(risk(p, x, labels), p)


def zeros(like: Params) -> Params:
    return {name: torch.zeros_like(value) for name, value in like.items()}


def inner(a: Params, b: Params) -> Tensor:
    """Return the inner product over the whole model."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()


def minus(a: Params, b: Params) -> Params:
    return {name: a[name] - b[name] for name in a}


def sgd(case: Case, y: Params, buffer: Params, g: Params) -> None:
    """Take one step with weight decay and momentum, in place on `y` and `buffer`."""
    for name in y:
        buffer[name] = case.momentum * buffer[name] + g[name] + case.decay * y[name]
        y[name] = y[name] - case.lr * buffer[name]


def local_sgd(case: Case, x: Params, r: int, client: int) -> Params:
    """Return the client's update after plain local training."""
    y = dict(x)
    buffer = zeros(x)
    for data, labels in case.batches(r, client):
        sgd(case, y, buffer, risk_grad(y, data, labels))
    return minus(y, x)


def mean_of(case: Case, sent: dict[int, Params]) -> Params:
    """Return the weighted mean of the clients' updates."""
    total = sum(case.weight(i) for i in sent)
    names = next(iter(sent.values()))
    return {
        name: torch.stack([case.weight(i) * sent[i][name] for i in sent]).sum(0) / total
        for name in names
    }


def add(x: Params, step: Params, scale: float | Tensor = 1.0) -> Params:
    return {name: x[name] + scale * step[name] for name in x}


def effective_steps(steps: int, momentum: float) -> float:
    """Return a(K, m): K steps with a constant gradient g move the model by -lr * a * g."""
    velocity = 0.0
    distance = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        distance = distance + velocity
    return distance


# --- methods that change the client's loss or gradient


def fedavg(case: Case) -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):
        x = add(x, mean_of(case, {i: local_sgd(case, x, r, i) for i in case.sampled(r)}))
    return {"params": x}


def fedprox(case: Case, mu: float) -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            y = dict(x)
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                g = risk_grad(y, data, labels)
                sgd(case, y, buffer, {name: g[name] + mu * (y[name] - x[name]) for name in y})
            sent[i] = minus(y, x)
        x = add(x, mean_of(case, sent))
    return {"params": x}


def scaffold(case: Case, strength: float = 1.0) -> dict[str, Any]:
    x = case.params
    c = zeros(x)
    controls: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        changes = {}
        for i in case.sampled(r):
            control = controls.get(i, zeros(x))
            y = dict(x)
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                g = risk_grad(y, data, labels)
                sgd(
                    case,
                    y,
                    buffer,
                    {name: g[name] + strength * (c[name] - control[name]) for name in y},
                )
            step_size = case.lr * effective_steps(case.num_steps(i), case.momentum)
            new_control = {
                name: (x[name] - y[name]) / step_size - strength * (c[name] - control[name])
                for name in y
            }
            sent[i] = minus(y, x)
            changes[i] = minus(new_control, control)
            controls[i] = new_control
        x = add(x, mean_of(case, sent))
        for change in changes.values():
            c = add(c, change, 1 / len(case.sizes))
    return {"params": x, "control": c, "controls": controls}


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / ((a * a).sum(1).sqrt() * (b * b).sum(1).sqrt())


def moon_term(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    positive = torch.exp(cosine(z, z_global) / temperature)
    negative = torch.exp(cosine(z, z_previous) / temperature)
    return -torch.log(positive / (positive + negative)).mean()


def moon(case: Case, mu: float, temperature: float = 0.5) -> dict[str, Any]:
    x = case.params
    previous: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            old = previous.get(i, x)
            y = dict(x)
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                p = leaves(y)
                z = features(p, data)
                term = moon_term(z, features(x, data), features(old, data), temperature)
                sgd(case, y, buffer, grad(cross_entropy(head(p, z), labels) + mu * term, p))
            sent[i] = minus(y, x)
            previous[i] = y
        x = add(x, mean_of(case, sent))
    return {"params": x, "previous": previous}


def fedsam(case: Case, rho: float) -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            y = dict(x)
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                g = risk_grad(y, data, labels)
                uphill = add(y, g, rho / (inner(g, g).sqrt() + 1e-12))
                sgd(case, y, buffer, risk_grad(uphill, data, labels))
            sent[i] = minus(y, x)
        x = add(x, mean_of(case, sent))
    return {"params": x}


def decorrelation(z: Tensor, normalisation: str) -> Tensor:
    """Return FedDecorr's regularizer of features (N, D), one pair of columns at a time."""
    n, d = z.shape
    if n == 1:
        return 0 * z.sum()
    z = z - z.sum(0) / n
    z = z / torch.sqrt((z * z).sum(0) / (n - 1) + 1e-8)
    pairs = [(j, k) for j in range(d) for k in range(d)]
    if normalisation == "code":
        squares = [(z[:, j] * z[:, k]).sum() ** 2 / n for j, k in pairs if j != k]
        return torch.stack(squares).sum() / len(squares)
    if normalisation != "paper":
        raise ValueError(normalisation)
    return torch.stack([((z[:, j] * z[:, k]).sum() / (n - 1)) ** 2 for j, k in pairs]).sum() / d**2


def feddecorr(case: Case, beta: float, normalisation: str = "code") -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            y = dict(x)
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                p = leaves(y)
                z = features(p, data)
                loss = cross_entropy(head(p, z), labels) + beta * decorrelation(z, normalisation)
                sgd(case, y, buffer, grad(loss, p))
            sent[i] = minus(y, x)
        x = add(x, mean_of(case, sent))
    return {"params": x}


def feddyn(case: Case, alpha: float, correction: float = 1.0) -> dict[str, Any]:
    """Compute FedDyn, with h and the clients' memories divided by alpha."""
    x = case.params
    h = zeros(x)
    memories: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            memory = memories.get(i, zeros(x))
            y = dict(x)
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                g = risk_grad(y, data, labels)
                sgd(
                    case,
                    y,
                    buffer,
                    {name: g[name] + alpha * (y[name] - x[name] - memory[name]) for name in y},
                )
            sent[i] = minus(y, x)
            memories[i] = minus(memory, sent[i])
        mean = mean_of(case, sent)
        h = add(h, mean, -len(sent) / len(case.sizes))
        x = {name: x[name] + mean[name] - correction * h[name] for name in x}
    return {"params": x, "h": h, "memories": memories}


# --- FedReg: generated examples and a projection


def ascend(frozen: Params, start: Tensor, labels: Tensor, steps: int, lr: float) -> Tensor:
    """Move inputs up the frozen model's loss by sign-gradient steps."""
    inputs = start.clone()
    for _ in range(steps):
        p = leaves({"x": inputs})
        inputs = inputs + lr * grad(risk(frozen, p["x"], labels), p)["x"].sign()
    return inputs


def removals(d: Params, g2: Params, g3: Params) -> tuple[Tensor, Tensor]:
    """Return the nonnegative coefficients of g2, then of g3, to subtract from the drift d."""
    w = (inner(d, g2) / (inner(g2, g2) + 1e-30)).clamp(min=0)
    rest = add(d, g2, -w)
    return w, (inner(rest, g3) / (inner(g3, g3) + 1e-30)).clamp(min=0)


def fedreg(
    case: Case,
    gamma: float,
    steps: int,
    pseudo_lr: float,
    perturbed_lr: float,
    strength: float,
    count: int,
) -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            start, truth = case.examples("own", count, r, i)
            pseudo = ascend(x, start, truth, steps, pseudo_lr)
            soft = torch.exp(log_softmax(head(x, features(x, pseudo))))
            perturbed = ascend(x, start, truth, steps, perturbed_lr)
            indices = case.extra_batches("pseudo", count, r, i)
            y = dict(x)
            buffer = zeros(x)
            for t, (data, labels) in enumerate(case.batches(r, i)):
                between = {name: gamma * y[name] + (1 - gamma) * x[name] for name in y}
                sgd(case, y, buffer, risk_grad(between, data, labels))
                middle = {name: (y[name] + x[name]) / 2 for name in y}
                u = pseudo[indices[t]]
                q = soft[indices[t]]
                v = perturbed[indices[t]]
                true = truth[indices[t]]
                p = leaves(middle)
                g2 = grad(-(q * log_softmax(head(p, features(p, u)))).sum(1).mean(), p)
                g3 = risk_grad(middle, v, true)
                w2, w3 = removals(minus(y, x), g2, g3)
                y = {name: y[name] - strength * (w2 * g2[name] + w3 * g3[name]) for name in y}
            sent[i] = minus(y, x)
        x = add(x, mean_of(case, sent))
    return {"params": x}


# --- methods that change the server's rule


def fednova(case: Case, strength: float = 1.0) -> dict[str, Any]:
    x = case.params
    for r in range(case.rounds):
        sent = {i: local_sgd(case, x, r, i) for i in case.sampled(r)}
        total = sum(case.weight(i) for i in sent)
        a = {i: effective_steps(case.num_steps(i), case.momentum) ** strength for i in sent}
        mean_steps = sum(case.weight(i) * a[i] for i in sent) / total
        for i in sent:
            x = add(x, sent[i], mean_steps * case.weight(i) / (total * a[i]))
    return {"params": x}


def fedavgm(case: Case, beta: float, variant: str = "plain") -> dict[str, Any]:
    x = case.params
    v = zeros(x)
    for r in range(case.rounds):
        mean = mean_of(case, {i: local_sgd(case, x, r, i) for i in case.sampled(r)})
        for name in x:
            if variant == "plain":
                v[name] = beta * v[name] + mean[name]
                x[name] = x[name] + v[name]
            elif variant == "damped":
                v[name] = beta * v[name] + (1 - beta) * mean[name]
                x[name] = x[name] + v[name]
            elif variant == "nesterov":
                v[name] = beta * v[name] + mean[name]
                x[name] = x[name] + mean[name] + beta * v[name]
            else:
                raise ValueError(variant)
    return {"params": x, "velocity": v}


def fedadam(
    case: Case,
    rule: str = "adam",
    lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> dict[str, Any]:
    """Compute FedOpt: Adam, Yogi, Adagrad or momentum on the server, without bias correction."""
    x = case.params
    m = zeros(x)
    v = {name: torch.full_like(value, tau**2) for name, value in x.items()}
    for r in range(case.rounds):
        mean = mean_of(case, {i: local_sgd(case, x, r, i) for i in case.sampled(r)})
        for name, step in mean.items():
            m[name] = beta1 * m[name] + (1 - beta1) * step
            square = step**2
            if rule == "adam":
                v[name] = beta2 * v[name] + (1 - beta2) * square
            elif rule == "yogi":
                v[name] = v[name] - (1 - beta2) * square * torch.sign(v[name] - square)
            elif rule == "adagrad":
                v[name] = v[name] + square
            elif rule != "sgd":
                raise ValueError(rule)
            x[name] = x[name] + lr * (
                m[name] if rule == "sgd" else m[name] / (v[name].sqrt() + tau)
            )
    return {"params": x, "m": m, "v": v}


def fedexp(case: Case, epsilon: float = 1e-3) -> dict[str, Any]:
    x = case.params
    scales = []
    for r in range(case.rounds):
        sent = {i: local_sgd(case, x, r, i) for i in case.sampled(r)}
        mean = mean_of(case, sent)
        total = sum(case.weight(i) for i in sent)
        spread = sum(case.weight(i) * float(inner(sent[i], sent[i])) for i in sent) / total
        scales.append(max(1.0, spread / (2 * (float(inner(mean, mean)) + epsilon))))
        x = add(x, mean, scales[-1])
    return {"params": x, "scales": scales}


# --- VHL: virtual data


def contrast(z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss; an anchor without positives counts as 0."""
    z = z / (z * z).sum(1, keepdim=True).sqrt()
    terms = []
    for i in range(len(z)):
        others = [k for k in range(len(z)) if k != i]
        denominator = torch.stack(
            [torch.exp((z[i] * z[k]).sum() / temperature) for k in others]
        ).sum()
        same = [j for j in others if labels[j] == labels[i]]
        logs = [torch.log(torch.exp((z[i] * z[j]).sum() / temperature) / denominator) for j in same]
        terms.append(-torch.stack(logs).sum() / len(same) if same else 0 * denominator)
    return torch.stack(terms).sum() / len(z)


def vhl(
    case: Case,
    alpha: float,
    lambda_align: float,
    kappa: float,
    temperature: float,
    align_epochs: int,
    virtual: int,
    labels: str = "separate",
    mu: float = 0.0,
) -> dict[str, Any]:
    if labels not in ("separate", "shared"):
        raise ValueError(labels)
    classes = case.classes
    x = case.params
    width = x["0.weight"].shape[1]
    virtual_labels = torch.tensor([j * classes // virtual for j in range(virtual)])
    means = case.normal("virtual_mean", (classes, width), 0, 0)
    noise = case.normal("virtual_noise", (virtual, width), 0, 0)
    inputs = ((means[virtual_labels] + 0.5 * noise).clamp(0, 1) - 0.5) / 0.25
    shift = 0
    if labels == "separate":
        shift = classes
        x[".virtual.weight"] = torch.zeros_like(x["2.weight"])
        x[".virtual.bias"] = torch.zeros_like(x["2.bias"])
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            indices = case.extra_batches("virtual", virtual, r, i)
            y = dict(x)
            buffer = zeros(x)
            for t, (data, real) in enumerate(case.batches(r, i)):
                u = inputs[indices[t]]
                v = virtual_labels[indices[t]]
                p = leaves(y)
                z = features(p, data)
                z_virtual = features(p, u)
                loss = cross_entropy(head(p, z), real) + alpha * cross_entropy(
                    head(p, z_virtual), shift + v
                )
                if math.floor(t * case.batch / case.sizes[i]) < align_epochs:
                    both = torch.cat([z, z_virtual.detach()])
                    loss = loss + lambda_align * contrast(both, torch.cat([real, v]), temperature)
                    loss = loss + kappa * contrast(z_virtual, v, temperature)
                g = grad(loss, p)
                sgd(case, y, buffer, {name: g[name] + mu * (y[name] - x[name]) for name in y})
            sent[i] = minus(y, x)
        x = add(x, mean_of(case, sent))
    return {"params": x}


# --- FedGen: a generator of features


def generate(
    generator: Params, eps: Tensor, y: Tensor, classes: int, moments: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return generated features for labels y, and the batch's mean and variance before BatchNorm.

    BatchNorm uses the given moments, or else those of the batch.
    """
    onehot = torch.zeros(len(y), classes, dtype=eps.dtype)
    onehot[torch.arange(len(y)), y] = 1
    hidden = torch.cat([eps, onehot], 1) @ generator["0.weight"].T
    mean = hidden.sum(0) / len(hidden)
    squares = ((hidden - mean) ** 2).sum(0)
    center, variance = (mean, squares / len(hidden)) if moments is None else moments
    hidden = (hidden - center) / torch.sqrt(variance + 1e-5)
    hidden = torch.relu(hidden * generator["1.weight"] + generator["1.bias"])
    generated = hidden @ generator["3.weight"].T + generator["3.bias"]
    return generated, mean.detach(), squares.detach() / max(1, len(hidden) - 1)


def diversity_term(eps: Tensor, z: Tensor) -> Tensor:
    """Return FedGen's diversity term: 1 for a constant generator, less if it uses the noise."""
    n = len(z)
    pairs = [
        ((eps[i] - eps[j]) ** 2).mean() * (z[i] - z[j]).abs().mean()
        for i in range(n)
        for j in range(n)
    ]
    return torch.exp(-torch.stack(pairs).sum() / n**2)


def fedgen(
    case: Case,
    alpha: float,
    beta: float,
    decay: float,
    steps: int,
    batch: int,
    lr: float,
    weight_decay: float,
    hidden: int,
    noise: int,
    diversity: float,
) -> dict[str, Any]:
    classes = case.classes
    x = case.params
    latent = x["2.weight"].shape[1]
    inputs = noise + classes
    drawn = case.normal("generator", (hidden * inputs + latent * hidden,), 0, 0)
    generator = {
        "0.weight": drawn[: hidden * inputs].reshape(hidden, inputs) / inputs**0.5,
        "1.weight": drawn.new_ones(hidden),
        "1.bias": drawn.new_zeros(hidden),
        "3.weight": drawn[hidden * inputs :].reshape(latent, hidden) / hidden**0.5,
        "3.bias": drawn.new_zeros(latent),
    }
    running = (drawn.new_zeros(hidden), drawn.new_ones(hidden))
    first = zeros(generator)
    second = zeros(generator)
    num_updates = 0
    losses = []
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            a = max(1e-4, alpha * decay**r)
            b = max(1e-4, beta * decay**r)
            shape = (case.num_steps(i), case.batch)
            made_labels = torch.floor(classes * case.uniform("made_labels", shape, r, i)).long()
            made_eps = case.uniform("made_eps", (*shape, noise), r, i)
            real_eps = case.uniform("real_eps", (*shape, noise), r, i)
            y = dict(x)
            buffer = zeros(x)
            for t, (data, labels) in enumerate(case.batches(r, i)):
                p = leaves(y)
                logits = head(p, features(p, data))
                loss = cross_entropy(logits, labels)
                if r > 0:
                    z_made = generate(generator, made_eps[t], made_labels[t], classes, running)[0]
                    z_real = generate(generator, real_eps[t], labels, classes, running)[0]
                    teacher = log_softmax(head(p, z_real)).detach()
                    distillation = (teacher.exp() * (teacher - log_softmax(logits))).sum(1).mean()
                    loss = (
                        loss + a * cross_entropy(head(p, z_made), made_labels[t]) + b * distillation
                    )
                sgd(case, y, buffer, grad(loss, p))
            sent[i] = minus(y, x)

        heads = {i: {name: x[name] + sent[i][name] for name in HEAD} for i in sent}
        num_seen = {i: case.num_steps(i) * case.batch for i in sent}
        counts = {i: 1 + case.counts(i).double() / case.sizes[i] * num_seen[i] for i in sent}
        available = [c for c in range(classes) if any(case.counts(i)[c] > 0 for i in sent)]
        places = torch.floor(
            case.uniform("server_labels", (steps, batch), r, 0) * len(available)
        ).long()
        all_eps = case.uniform("server_eps", (steps, batch, noise), r, 0)
        values = []
        for t in range(steps):
            targets = torch.tensor(available)[places[t]]
            p = leaves(generator)
            z, mean, variance = generate(p, all_eps[t], targets, classes, None)
            running = (0.9 * running[0] + 0.1 * mean, 0.9 * running[1] + 0.1 * variance)
            loss = diversity * diversity_term(all_eps[t], z)
            for i in heads:
                share = counts[i][targets] / torch.stack([counts[j][targets] for j in counts]).sum(
                    0
                )
                loss = loss + (share * cross_entropies(head(heads[i], z), targets)).mean()
            values.append(float(loss.detach()))
            g = grad(loss, p)
            num_updates += 1
            for name in generator:
                direction = g[name] + weight_decay * generator[name]
                first[name] = 0.9 * first[name] + 0.1 * direction
                second[name] = 0.999 * second[name] + 0.001 * direction**2
                scale = (second[name] / (1 - 0.999**num_updates)).sqrt() + 1e-8
                generator[name] = (
                    generator[name] - lr * decay**r * first[name] / (1 - 0.9**num_updates) / scale
                )
        losses.append(sum(values) / steps)
        x = add(x, mean_of(case, sent))
    generator_state = {**generator, "1.running_mean": running[0], "1.running_var": running[1]}
    return {"params": x, "generator": generator_state, "losses": losses}


# --- personalized methods


def fedrep(case: Case, head_share: float) -> dict[str, Any]:
    start = case.params
    body = {name: start[name] for name in BODY}
    heads: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            client_head = heads.get(i, {name: start[name] for name in HEAD})
            y = {**body, **client_head}
            buffer = zeros(y)
            head_steps = round(head_share * case.num_steps(i))
            for t, (data, labels) in enumerate(case.batches(r, i)):
                moving = HEAD if t < head_steps else BODY
                g = risk_grad(y, data, labels)
                for name in y:
                    direction = (g[name] if name in moving else 0) + case.decay * y[name]
                    buffer[name] = case.momentum * buffer[name] + direction
                for name in moving:
                    y[name] = y[name] - case.lr * buffer[name]
            sent[i] = {name: y[name] - body[name] for name in BODY}
            heads[i] = {name: y[name] for name in HEAD}
        body = add(body, mean_of(case, sent))
    return {"params": body, "heads": heads}


def ditto(case: Case, lambda_pull: float) -> dict[str, Any]:
    x = case.params
    personal: dict[int, Params] = {}
    for r in range(case.rounds):
        sent = {}
        for i in case.sampled(r):
            personal_model = dict(personal.get(i, x))
            buffer = zeros(x)
            for data, labels in case.batches(r, i):
                g = risk_grad(personal_model, data, labels)
                pull = minus(personal_model, x)
                sgd(case, personal_model, buffer, add(g, pull, lambda_pull))
            personal[i] = personal_model
            sent[i] = local_sgd(case, x, r, i)
        x = add(x, mean_of(case, sent))
    return {"params": x, "personal": personal}
