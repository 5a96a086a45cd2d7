"""The federation on Flower: a server that asks its nodes over a grid, and nodes that are each a cohort of one.

Down go the algorithm's broadcast and the round's number; up come one client's payload and a few findings. What a client
keeps stays at its node, in `context.state`. Everything that arrives is checked against the form it must have.
"""

import contextlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Nothing is reported home, and Ray hides no GPU from nodes; both are looked up while Flower is loaded.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.federation.outcomes import Outcome, one_after_another
from fedcog.federation.payloads import Unfit, fitted
from fedcog.federation.rounds import Gathered, Work
from fedcog.federation.simulation import Simulation
from fedcog.tree import Params, State

FIND, TRAIN = "query", "train"
PARTS = ("generation", "training", "evaluation")


class Ready(NamedTuple):
    """An experiment made ready in a process: the simulation that knows its clients, and its algorithm."""

    simulation: Simulation
    algorithm: Algorithm


Prepare = Callable[[], Ready]


class Nodes:
    """The clients of a federation behind a grid, found by the partition each of them holds.

    Answers are waited for `patience` seconds, or as long as it takes.
    """

    def __init__(self, grid: Grid, ready: Ready, patience: float | None = None) -> None:
        self._grid, self._ready, self._patience = grid, ready, patience
        self._places: dict[int, int] = {}

    def gather(self, work: Work) -> Gathered:
        """The sum of the clients' payloads, in the order of their numbers, and findings."""
        simulation, algorithm = self._ready
        if missing := set(work.clients) - self._places.keys():
            self._find(missing)
        asked: dict[str, Any] = {"round": work.round, "lr": work.lr, "score": work.before is not None}
        content: dict[str, Any] = {"shared": arrays(work.shared), "ask": ConfigRecord(asked)}
        messages = [
            Message(RecordDict(content), dst_node_id=self._places[client], message_type=TRAIN)
            for client in work.clients
        ]
        form = simulation.form(algorithm, work.shared)
        began, answers = time.perf_counter(), dict[int, Outcome]()
        refused = dict.fromkeys(work.clients, "it did not answer in time.")
        whose = {self._places[client]: client for client in work.clients}
        for reply in self._grid.send_and_receive(messages, timeout=self._patience):
            client = whose[reply.metadata.src_node_id]
            try:
                answers[client] = outcome(reply, form, score=work.before is not None)
                del refused[client]
            except Unfit as error:
                refused[client] = str(error)
        there = [client for client in work.clients if client in answers]
        if not there:
            why = "; ".join(f"client {client}: {reason}" for client, reason in refused.items())
            raise RuntimeError(f"in round {work.round + 1} no node gave an answer that can be used. {why}")
        for client, why in refused.items():
            warnings.warn(f"round {work.round + 1} goes on without client {client}: {why}", stacklevel=2)
        seconds = dict.fromkeys(PARTS, 0.0) | {"training": time.perf_counter() - began}
        done = one_after_another([answers[client] for client in there])._replace(seconds=lambda: seconds)
        gathered = simulation.gathered(there, work.round, work.before, done, [])
        return gathered._replace(settle=lambda read: gathered.settle(read)._replace(refused=refused))

    def _find(self, wanted: set[int]) -> None:
        """Ask all nodes which partition they hold, until all of `wanted` are there."""
        end = time.monotonic() + (math.inf if self._patience is None else self._patience)
        while not wanted <= self._places.keys():
            if time.monotonic() > end:
                lost = ", ".join(map(str, sorted(wanted - self._places.keys())))
                raise RuntimeError(f"no node holds partition {lost}: are all SuperNodes running?")
            nodes = set(self._grid.get_node_ids()) - set(self._places.values())
            messages = [Message(RecordDict(), dst_node_id=node, message_type=FIND) for node in nodes]
            for reply in self._grid.send_and_receive(messages, timeout=self._patience) if messages else ():
                if not reply.has_error():
                    own: dict[str, Any] = dict(reply.content.config_records["node"])
                    self._places[int(own["partition-id"])] = reply.metadata.src_node_id
            if not nodes:
                time.sleep(0.1)


def client_app(prepare: Prepare) -> ClientApp:
    """What runs at a node: `prepare` makes the experiment ready there, and is called once a process or more often."""
    app = ClientApp()

    @app.query()
    def find(message: Message, context: Context) -> Message:
        own = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": own}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        simulation, algorithm = prepare()
        client, ask = int(context.node_config["partition-id"]), dict[str, Any](message.content.config_records["ask"])
        sent = tensors(message.content.array_records["shared"])
        shared = fitted(algorithm.broadcast(simulation.begin(algorithm)), sent)
        kept = algorithm.client_init(shared)
        if "kept" in context.state:
            kept = fitted(kept, tensors(context.state.array_records["kept"]))
        done, kept = simulation.alone(
            algorithm, shared, client, kept, int(ask["round"]), float(ask["lr"]), bool(ask["score"])
        )
        context.state["kept"] = arrays(kept)
        return Message(RecordDict({"found": arrays(told(done))}), reply_to=message)

    return app


def told(done: Outcome) -> State:
    """What of a client's round goes to the server: all but what it keeps."""
    names = ("total", "sound", "keepable", "loss", "distance", "exhibit")
    found = {name: getattr(done, name) for name in names}
    return found if done.hits is None else found | {"hits": done.hits}


def outcome(reply: Message, form: State, score: bool) -> Outcome:
    """A client's round as it was told, if it has the form it must have."""
    if reply.has_error():
        raise Unfit(f"the node failed: {reply.error.reason}")
    found = reply.content.get("found")
    if not isinstance(found, ArrayRecord):
        raise Unfit("the answer holds no arrays by the name 'found'.")
    flat = tensors(found)
    exhibit = {name: value for name, value in flat.items() if name.startswith("exhibit::")}
    told = fitted(form if score else {k: v for k, v in form.items() if k != "hits"}, flat, besides=exhibit)
    shown = tree.unflatten(exhibit).get("exhibit", {})
    return Outcome(kept={}, hits=told.pop("hits", None), exhibit=shown, seconds=dict, **told)


def arrays(state: State) -> ArrayRecord:
    """A state as Flower carries it."""
    return ArrayRecord({name: value.detach().cpu().contiguous() for name, value in tree.flatten(state).items()})


def tensors(record: ArrayRecord) -> Params:
    """What Flower carried, flat as it came; nothing in it is ever unpickled."""
    try:
        return dict(record.to_torch_state_dict())
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise Unfit(f"it cannot be read: {error}") from error


def simulate(serve: Callable[[Nodes], None], ready: Ready, prepare: Prepare) -> None:
    """Run `serve` as the server of Flower's simulation engine, with a node for each client, on one core at a time."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        serve(Nodes(grid, ready))

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    with _quiet():
        run_simulation(
            server,
            client_app(prepare),
            num_supernodes=ready.simulation.cohort.data.clients,
            backend_config={
                "client_resources": resources,
                "init_args": {"num_cpus": os.cpu_count() or 1},
            },
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, Flower tells of errors alone."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
