"""FedAvg in plain PyTorch, and the three lines that make it FedCOG.

python examples/bare_loop.py
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedcog

CLIENTS = 5
ROUNDS = 20
AWAKE = 15
STEPS = 20


def train(model: nn.Module, x: Tensor, y: Tensor, made: fedcog.GeneratedData | None) -> nn.Module:
    """A client's local training; with `made`, complemented by generated inputs."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        index = torch.randint(len(y), (32,))
        loss = F.cross_entropy(model(x[index]), y[index])
        if made is not None:
            loss = made.loss(loss, model, size=32)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model


def main() -> None:
    """Five clients that hold two digits each."""
    torch.manual_seed(0)
    pictures, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = pictures.float() / 8 - 1
    y = digits
    clients = [
        torch.isin(y[:1400], torch.tensor([2 * client, 2 * client + 1]))
        for client in range(CLIENTS)
    ]
    data = [(x[:1400][own], y[:1400][own]) for own in clients]
    server = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    previous: list[nn.Module | None] = [None] * CLIENTS
    for round in range(ROUNDS):
        local = []
        for client, (own_x, own_y) in enumerate(data):
            made = None
            if round >= AWAKE:
                class_counts = own_y.bincount(minlength=10)
                made = fedcog.generate(
                    server, previous[client], class_counts, [64], round=round, client=client
                )
            local.append(train(copy.deepcopy(server), own_x, own_y, made))
            previous[client] = local[-1]
        states = [model.state_dict() for model in local]
        server.load_state_dict(
            {name: torch.stack([one[name] for one in states]).mean(0) for name in states[0]}
        )
        right = (server(x[1400:]).argmax(-1) == y[1400:]).float().mean()
        print(
            f"round {round + 1}: {right:.1%}"
            + (" (FedCOG)" if round >= AWAKE else "")
            + (", last" * (round == 19))
        )


if __name__ == "__main__":
    main()
