"""A network of your own in a file.

python examples/my_network.py
fedcog run --model examples/my_network.py:Net
"""

from torch import Tensor, nn

import fedcog


class Net(nn.Module):
    """Two convolutions with BatchNorm and dropout; fedcog calls it with these arguments."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(input_shape[0], 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
        )
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


if __name__ == "__main__":
    experiment = fedcog.Experiment(clients=4, beta=1.0, rounds=4, local_steps=20, lr=0.05)
    run = fedcog.run(experiment, "runs/my-network", model=Net, resume=True)
    print(f"last {run.last:.1%}; the same from the command line: --model my_network.py:Net")
