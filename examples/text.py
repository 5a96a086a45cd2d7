"""Text: a network that embeds tokens, and FedCOG that generates embeddings.

python examples/text.py
"""

from dataclasses import replace

import numpy as np
from torch import Tensor, nn

import fedcog

# Sentences of 12 words; most are from the vocabulary of the sentence's topic. Yours come from a
# tokenizer, padded to one length.
rng = np.random.default_rng(0)
topics = rng.integers(0, 4, 1200)
own_words = rng.integers(0, 50, (1200, 12)) + 50 * topics[:, None]
other_words = rng.integers(0, 200, (1200, 12))
tokens = np.where(rng.random((1200, 12)) < 0.4, own_words, other_words)

data = fedcog.from_arrays(
    tokens[:800], topics[:800], tokens[800:], topics[800:], classes=["a", "b", "c", "d"]
)


class TextNetwork(nn.Module):
    """A network on tokens offers two methods: `embed` and `forward_embedded`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 16)
        self.layers = nn.Sequential(
            nn.Conv1d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten()
        )
        self.head = nn.Linear(32, num_classes)

    def embed(self, tokens: Tensor) -> Tensor:  # (N, 12) -> (N, 12, 16)
        embedded: Tensor = self.words(tokens)
        return embedded

    def forward_embedded(self, x: Tensor) -> Tensor:  # (N, 12, 16) -> (N, 4)
        logits: Tensor = self.head(self.layers(x.mT))
        return logits


base = fedcog.Experiment(
    partition="label-skew", clients=4, rounds=16, local_steps=20, batch_size=32, lr=0.1, threads=1
)
algorithms = [fedcog.FedAvg(), fedcog.FedCOG(start_round=8, count=32, steps=20)]
experiments = [replace(base, algorithm=algorithm) for algorithm in algorithms]
runs = fedcog.compare(experiments, seeds=[0], out="runs/text", data=data, model=TextNetwork)
for group in fedcog.group(runs):
    print(f"{group.label}: last {group.last.percent()}")
