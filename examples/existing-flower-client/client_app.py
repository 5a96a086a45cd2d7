"""A client app in the shape of Flower's quickstart; the lines marked FedCOG are what was added to
it.
"""

from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data, train

import fedcog  # FedCOG

app = ClientApp()


@app.train()
def local_training(message: Message, context: Context) -> Message:
    """Train the model that was sent on this client's data, and send it back."""
    net = Net()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    partition, partitions = (
        int(context.node_config[key]) for key in ("partition-id", "num-partitions")
    )
    loader, _ = load_data(partition, partitions)
    config: dict[str, Any] = dict(message.content.config_records["config"])
    made = None
    if "previous" in context.state and config["server-round"] > config["fedcog-from"]:  # FedCOG
        previous = Net()  # FedCOG
        previous.load_state_dict(
            context.state.array_records["previous"].to_torch_state_dict()
        )  # FedCOG
        class_counts = loader.dataset.tensors[1].bincount(minlength=10)  # type: ignore[attr-defined]  # FedCOG
        made = fedcog.generate(
            net, previous, class_counts, [64], round=config["server-round"], client=partition
        )  # FedCOG
    loss = train(net, loader, epochs=1, lr=config["lr"], made=made)
    context.state["previous"] = ArrayRecord(net.state_dict())  # FedCOG
    metrics = MetricRecord({"loss": loss, "num-examples": len(loader.dataset)})  # type: ignore[arg-type]
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
