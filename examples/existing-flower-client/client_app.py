"""A client app that follows Flower's quickstart. The lines marked FedCOG were added."""

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data, train

import fedcog  # FedCOG

app = ClientApp()


@app.train()
def local_training(message: Message, context: Context) -> Message:
    """Train the received model on this client's data, and send it back."""
    net = Net()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    partition_id = int(context.node_config["partition-id"])
    num_partitions = int(context.node_config["num-partitions"])
    loader, _ = load_data(partition_id, num_partitions)
    config: dict[str, Any] = dict(message.content.config_records["config"])
    made = None
    if "previous" in context.state and config["server-round"] > config["fedcog-from"]:  # FedCOG
        previous = Net()  # FedCOG
        previous.load_state_dict(
            context.state.array_records["previous"].to_torch_state_dict()
        )  # FedCOG
        class_counts = loader.dataset[:][1].bincount(minlength=10)  # FedCOG
        made = fedcog.generate(
            net, previous, class_counts, [64], round=config["server-round"], client=partition_id
        )  # FedCOG
    loss = train(net, loader, epochs=1, lr=config["lr"], made=made)
    context.state["previous"] = ArrayRecord(net.state_dict())  # FedCOG
    num_examples = len(loader.dataset)  # type: ignore[arg-type]
    metrics = MetricRecord({"loss": loss, "num-examples": num_examples})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
