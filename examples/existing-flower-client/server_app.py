"""A server app that follows Flower's quickstart: FedAvg, unchanged by FedCOG."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Net, load_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg, and test the global model after every round."""
    torch.manual_seed(0)
    accuracies: list[float] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        _, test_set = load_data(0, 5)
        accuracies.append(test(net, test_set))
        return MetricRecord({"accuracy": accuracies[-1]})

    settings = context.run_config
    config = ConfigRecord({"lr": 0.05, "fedcog-from": int(settings.get("fedcog-from", 8))})
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(
        grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(settings.get("rounds", 12)),
        train_config=config,
        evaluate_fn=evaluate,
    )
    for round, accuracy in enumerate(accuracies):
        print(f"round {round}: {accuracy:.1%}")
    print(f"last: {accuracies[-1]:.1%}")
