"""FedAvg in plain PyTorch, and the three lines that turn it into FedCOG.

python examples/bare_loop.py
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedcog

NUM_CLIENTS = 5
NUM_ROUNDS = 20
START_ROUND = 15
LOCAL_STEPS = 20
NUM_TRAIN = 1400


def train(model: nn.Module, x: Tensor, y: Tensor, made: fedcog.GeneratedData | None) -> nn.Module:
    """Train one client's model, on generated inputs too if there are any."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(LOCAL_STEPS):
        indices = torch.randint(len(y), (32,))
        loss = F.cross_entropy(model(x[indices]), y[indices])
        if made is not None:
            loss = made.loss(loss, model, size=32)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def main() -> None:
    """Train with five clients that hold two digits each."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 8 - 1
    train_x = images[:NUM_TRAIN]
    train_y = labels[:NUM_TRAIN]
    test_x = images[NUM_TRAIN:]
    test_y = labels[NUM_TRAIN:]
    client_data = []
    for client in range(NUM_CLIENTS):
        is_own = torch.isin(train_y, torch.tensor([2 * client, 2 * client + 1]))
        client_data.append((train_x[is_own], train_y[is_own]))
    global_model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    previous_models: list[nn.Module | None] = [None] * NUM_CLIENTS
    for round in range(NUM_ROUNDS):
        states = []
        for client, (x, y) in enumerate(client_data):
            made = None
            if round >= START_ROUND:
                class_counts = y.bincount(minlength=10)
                previous = previous_models[client]
                made = fedcog.generate(
                    global_model, previous, class_counts, [64], round=round, client=client
                )
            local_model = train(copy.deepcopy(global_model), x, y, made)
            previous_models[client] = local_model
            states.append(local_model.state_dict())
        global_model.load_state_dict(
            {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
        )
        accuracy = (global_model(test_x).argmax(-1) == test_y).float().mean()
        note = " (FedCOG)" if round >= START_ROUND else ""
        note += ", last" if round == NUM_ROUNDS - 1 else ""
        print(f"round {round + 1}: {accuracy:.1%}{note}")


if __name__ == "__main__":
    main()
