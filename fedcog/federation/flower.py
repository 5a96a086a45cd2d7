"""The federation on Flower: a server that asks its nodes over a grid, and nodes that are each a cohort of one.

Down go the algorithm's broadcast and the round's number; up come one client's payload and a few findings, or with
secure aggregation a masked vector and nothing else. What a client keeps stays at its node, in `context.state`.
Everything that arrives is checked against the form it must have.
"""

import contextlib
import functools
import logging
import math
import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

# Nothing is reported home, Ray hides no GPU from nodes, and starts no process for each core that none of them will use,
# theirs being of another environment; all are looked up while Flower is loaded or Ray started.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.common.serde import recorddict_to_proto
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid, ServerApp

from fedcog import tree
from fedcog.algorithms import Algorithm
from fedcog.federation import masking
from fedcog.federation.keepsakes import Keepsake
from fedcog.federation.outcomes import Outcome, one_after_another
from fedcog.federation.payloads import NotFinite, Unfit, finite, fitted, joined, read_array
from fedcog.federation.rounds import Diverged, Gathered, NoAnswer, Report, Work
from fedcog.federation.simulation import Simulation
from fedcog.tree import Params, State

__all__ = ["ClientApp", "Context", "Nodes", "Ready", "ServerApp", "client_app", "server_app", "simulate"]

FIND, TRAIN = "query", "train"
PARTS = ("generation", "training", "evaluation")
NEIGHBOURS = 33  # in SecAgg+, how many clients at most share in a client's secret
FINDING = 120.0  # seconds at most that a node may take to say which partition it holds
SPARE = 2**16  # bytes that an answer may be larger than what it must hold: names and headers


class Ready(NamedTuple):
    """An experiment made ready in a process: the simulation that knows its clients, and its algorithm.

    `secure` is what the scales of secure aggregation are multiplied by; 0: payloads are sent as they are.
    """

    simulation: Simulation
    algorithm: Algorithm
    secure: float = 0.0


Prepare = Callable[[Context], Ready]


class Ledger:
    """A grid that counts what goes over it: bytes down and up by node, who failed last time, and who was away."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.down, self.up = dict[int, int](), dict[int, int]()
        self.failures, self.away = dict[int, str](), set[int]()
        self._asked: dict[str, int] = {}

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are connected."""
        return self._grid.get_node_ids()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The answers to messages that came in time."""
        sent, size = list(messages), dict[int, int]()
        for message in sent:
            whole = size.setdefault(id(message.content), _bytes(message.content))
            node = message.metadata.dst_node_id
            self.down[node] = self.down.get(node, 0) + whole
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        self._asked |= {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
        for reply in replies:
            node = self.sender(reply)
            self.failures.pop(node, None)
            self.away.discard(node)
            if reply.has_error():
                self.failures[node] = _reason(reply)
                self.away |= {node} if reply.error.code == ErrorCode.NODE_UNAVAILABLE else set()
            else:
                self.up[node] = self.up.get(node, 0) + _bytes(reply.content)
        return replies

    def sender(self, reply: Message) -> int:
        """The node that a reply is of: for one that is gone, the SuperLink answers in its own name."""
        return self._asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)


class Nodes:
    """The clients of a federation behind a grid, found by the partition each of them holds.

    Answers are waited for `patience` seconds, or as long as it takes.
    """

    def __init__(
        self, grid: Grid, context: Context, ready: Ready, run: str = "", patience: float | None = None
    ) -> None:
        self._grid, self._context, self._ready, self._run, self._patience = grid, context, ready, run, patience
        self._places: dict[int, int] = {}
        self._begun = False

    def gather(self, work: Work) -> Gathered:
        """The sum of the clients' payloads, in the order of their numbers, and findings."""
        ledger, began, end = Ledger(self._grid), time.perf_counter(), self._end()
        asked = {"round": work.round, "lr": work.lr, "score": work.before is not None, "run": self._run}
        asked |= {"shape": list(self._ready.simulation.cohort.model.input_shape)}
        content: dict[str, Any] = {"shared": arrays(work.shared), "ask": ConfigRecord(cast(Any, asked))}
        gather = self._masked_sum if self._ready.secure else self._sum
        while True:
            there = self._present(work.clients)
            try:
                gathered, refused = gather(work, there, content, ledger)
                break
            except NoAnswer as error:
                gone = ledger.away and ledger.away == ledger.failures.keys()  # for that they are asked again
                if not gone or time.monotonic() > end:
                    raise
                warnings.warn(f"{error} They are waited for.", stacklevel=2)
                self._rest()
        refused |= {
            client: "no node with this partition is connected." for client in work.clients if client not in there
        }
        for client, why in sorted(refused.items()):
            warnings.warn(f"round {work.round + 1} goes on without client {client}: {why}", stacklevel=2)
        seconds = dict.fromkeys(PARTS, 0.0) | {"training": time.perf_counter() - began}

        def settle(read: State) -> Report:
            report = gathered.settle(read)
            for line in report.local:
                node = there[int(line["client"])]
                line |= {"down": ledger.down.get(node, 0), "up": ledger.up.get(node, 0)}
            return report._replace(refused=refused, seconds=seconds)

        return gathered._replace(settle=settle)

    def _sum(
        self, work: Work, there: dict[int, int], content: dict[str, Any], ledger: Ledger
    ) -> tuple[Gathered, dict[int, str]]:
        """What is made of answers in clear, and who gave none that can be used, for what reason."""
        simulation, algorithm, _ = self._ready
        form = simulation.form(algorithm, work.shared)
        private = simulation.cohort.privacy is not None
        form = {"total": form["total"]} if private else form
        messages = [Message(RecordDict(content), dst_node_id=node, message_type=TRAIN) for node in there.values()]
        whose = {node: client for client, node in there.items()}
        answers, odd = dict[int, State](), list[int]()
        refused = dict.fromkeys(there, "it did not answer in time.")
        for reply in ledger.send_and_receive(messages, timeout=self._patience):
            client = whose[ledger.sender(reply)]
            try:
                found = answer(reply, form, score=work.before is not None)
                hits = found.get("hits", simulation.most)
                if not bool(((hits >= 0) & (hits <= simulation.most)).all()):
                    raise Unfit("it tells of fewer right answers than none, or of more than there are.")
                answers[client] = found
                del refused[client]
            except Unfit as error:
                refused[client] = str(error)
                odd += [client] if isinstance(error, NotFinite) else []
        heard = sorted(answers)
        if not heard:
            if odd:
                raise Diverged(sorted(odd), work.round)
            raise NoAnswer(f"in round {work.round + 1} no node gave an answer that can be used. {_listed(refused)}")
        if private:
            return _blind(joined([answers[client]["total"] for client in heard]), math.nan, heard), refused
        weights = torch.stack([answers[client]["total"]["weight"] for client in heard])
        done = one_after_another([_outcome(answers[client]) for client in heard])
        gathered = simulation.gathered(heard, work.round, work.before, done, [])
        return gathered._replace(findings=gathered.findings | {"weight": weights}), refused

    def _masked_sum(
        self, work: Work, there: dict[int, int], content: dict[str, Any], ledger: Ledger
    ) -> tuple[Gathered, dict[int, str]]:
        """What is made of masked answers, of which nothing but the sum is ever known; and who dropped out."""
        simulation, algorithm, factor = self._ready
        form = simulation.form(algorithm, work.shared)["total"]
        protocol = Masked(len(there), content, self._patience)
        whose = {node: client for client, node in there.items()}
        heard, mean = protocol.carry_out(cast(Grid, ledger), self._context, work.round, there.values())
        refused = {
            client: ledger.failures.get(node, "it did not answer in time.")
            for client, node in there.items()
            if node not in heard
        }
        if mean is None or len(mean) != masking.size(form):
            raise NoAnswer(
                f"in round {work.round + 1} secure aggregation came to no sum: of {len(there)} clients "
                f"{protocol.threshold} must stay to its end. {_listed(refused)}"
            )
        total, loss = masking.total(mean * len(heard), form, algorithm.scales, factor)
        mean_loss = math.nan if simulation.cohort.privacy else loss / float(total["weight"])
        total = tree.to(total, simulation.cohort.data.device)
        return _blind(total, mean_loss, sorted(whose[node] for node in heard)), refused

    def _present(self, clients: list[int]) -> dict[int, int]:
        """The nodes of those clients that are connected. In the first round all are waited for, later any will do."""
        end = self._end()
        while True:
            online = set(self._grid.get_node_ids())
            self._places = {client: node for client, node in self._places.items() if node in online}
            self._find(online - set(self._places.values()))
            there = {client: self._places[client] for client in clients if client in self._places}
            if len(there) == len(clients) or (there and (self._begun or time.monotonic() > end)):
                self._begun = True
                return there
            if time.monotonic() > end:
                lost = ", ".join(map(str, clients))
                raise NoAnswer(f"no node holds partition {lost}: are the SuperNodes running?")
            self._rest()

    def _end(self) -> float:
        """When patience that begins now will have run out."""
        return time.monotonic() + (math.inf if self._patience is None else self._patience)

    def _rest(self) -> None:
        time.sleep(0.1 if self._patience is None else 1.0)

    def _find(self, nodes: set[int]) -> None:
        """Ask nodes which partition they hold."""
        messages = [Message(RecordDict(), dst_node_id=node, message_type=FIND) for node in nodes]
        patience = None if self._patience is None else min(self._patience, FINDING)
        for reply in self._grid.send_and_receive(messages, timeout=patience) if messages else ():
            own: Any = None if reply.has_error() else reply.content.get("node")
            number = own.get("partition-id") if isinstance(own, ConfigRecord) else None
            if isinstance(number, int) and 0 <= number < self._ready.simulation.cohort.data.clients:
                if number in self._places:
                    warnings.warn(f"two nodes hold partition {number}: the second one is not asked.", stacklevel=2)
                self._places.setdefault(number, reply.metadata.src_node_id)


class Masked(SecAggPlusWorkflow):
    """One round of Flower's SecAgg+ among so many clients, who are sent `content` to train on.

    Flower's own loses the round when somebody drops out before having shared secrets; here such a client is forgotten.
    """

    def __init__(self, clients: int, content: dict[str, Any], timeout: float | None) -> None:
        shares = min(clients, NEIGHBOURS)
        self.threshold, self._content = max(3, shares // 2 + 1), content  # of two, each would know the other's
        self._mean: torch.Tensor | None = None
        self._heard = set[int]()
        if clients < 3:
            raise NoAnswer(f"secure aggregation needs three clients a round, and {clients} are there.")
        levels = masking.levels(clients)
        ranges: dict[str, Any] = {"clipping_range": 1.0, "quantization_range": levels, "modulus_range": masking.MODULUS}
        threshold = self.threshold if self.threshold < shares else 1.0  # all of them
        super().__init__(shares, threshold, max_weight=1.0, timeout=timeout, **ranges)

    def carry_out(
        self, grid: Grid, context: Context, round: int, nodes: Iterable[int]
    ) -> tuple[set[int], torch.Tensor | None]:
        """The nodes whose vectors are in the sum, and the mean of those vectors; None if too few stayed."""
        nothing = FitIns(Parameters([], "numpy.ndarray"), {})
        proxies = [(SimpleNamespace(node_id=node), nothing) for node in nodes]
        plan = SimpleNamespace(configure_fit=lambda *_: proxies, aggregate_fit=self._aggregate)
        count = SimpleNamespace(num_available=lambda: len(proxies))
        legacy = LegacyContext(context, strategy=cast(Any, plan), client_manager=cast(Any, count))
        legacy.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round + 1})
        legacy.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
        self(grid, legacy)
        return self._heard, self._mean

    def _aggregate(self, _: int, results: list[tuple[Any, FitRes]], __: Any) -> tuple[None, dict[str, Any]]:
        self._heard = {proxy.node_id for proxy, _ in results}
        self._mean = torch.from_numpy(parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, {}

    def setup_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Flower's; what is sent to be trained on is ours."""
        going = bool(super().setup_stage(grid, context, state))
        state.nid_to_fitins = {node: RecordDict(self._content) for node in state.nid_to_fitins}
        return _without_the_lost(state) and going

    def share_keys_stage(self, grid: Grid, context: Any, state: Any) -> bool:
        """Flower's."""
        return bool(super().share_keys_stage(grid, context, state)) and _without_the_lost(state)


def _without_the_lost(state: Any) -> bool:
    """Forget who has dropped out: nobody has masked anything with them yet. Are enough left?"""
    state.sampled_node_ids = set(state.active_node_ids)
    near = state.nid_to_neighbours.items()
    state.nid_to_neighbours = {node: own & state.active_node_ids for node, own in near if node in state.active_node_ids}
    return all(len(own) >= state.threshold for own in state.nid_to_neighbours.values())


def client_app(prepare: Prepare) -> ClientApp:
    """What runs at a node: `prepare` makes the experiment ready there, and is called once a process or more often."""
    app = ClientApp(mods=[_masked])

    @app.query()
    def find(message: Message, context: Context) -> Message:
        own = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": own}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        simulation, algorithm, secure = prepare(context)
        if bool(secure) != (RECORD_KEY_CONFIGS in message.content):
            raise Unfit("the server and this node do not agree on whether payloads are masked.")
        client, ask = int(context.node_config["partition-id"]), dict[str, Any](message.content.config_records["ask"])
        own, shape = list(simulation.cohort.model.input_shape), ask["shape"]
        if own != shape:
            raise Unfit(f"this node's examples are of shape {own}, and the federation's of {shape}.")
        sent, round = tensors(message.content.array_records["shared"]), int(ask["round"])
        shared = fitted(algorithm.broadcast(simulation.begin(algorithm)), sent)
        privacy = simulation.cohort.privacy
        once = privacy is not None and privacy.where == "local" and not privacy.simulated
        keepsake = Keepsake(context.node_config.get("state-dir"), str(ask["run"]), client, once)
        if "kept" in context.state:
            keepsake.given(tensors(context.state.array_records["kept"]))
        before = keepsake.before(round, simulation.newcomer(algorithm, shared, client))
        done, after = simulation.alone(
            algorithm, shared, client, before, round, float(ask["lr"]), bool(ask["score"]) and not secure
        )
        if secure:
            loss = done.loss[0] * done.total["weight"] * (not privacy)  # or it would tell too much
            masked = masking.vector(done.total, loss, algorithm.scales, secure)
            result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([masked.numpy()]), 1, {})
            reply = fitres_to_recorddict(result, keep_input=True)
        else:
            found = {"total": done.total} if privacy else findings(done)
            reply = RecordDict({"found": arrays(found)})
        context.state["kept"] = arrays(keepsake.keep(round, before, after))
        return Message(reply, reply_to=message)

    return app


def _masked(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Flower's part of secure aggregation at a node, where it is asked for."""
    if RECORD_KEY_CONFIGS in message.content:
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)


def findings(done: Outcome) -> State:
    """What of a client's round goes to the server in clear."""
    found = {"total": done.total, "loss": done.loss, "distance": done.distance}
    return found if done.hits is None else found | {"hits": done.hits}


def answer(reply: Message, form: State, score: bool) -> State:
    """What a client told of its round, if it has the form it must have."""
    if reply.has_error():
        raise Unfit(_reason(reply))
    return told(reply.content.get("found"), form, score)


def told(found: Any, form: State, score: bool) -> State:
    """What a client told, from whatever stands where its findings should."""
    if not isinstance(found, ArrayRecord):
        raise Unfit("the answer holds no arrays by the name 'found'.")
    form = form if score else {name: part for name, part in form.items() if name != "hits"}
    most = sum(value.numel() * value.element_size() for value in tree.flatten(form).values()) + SPARE
    if found.count_bytes() > most:
        raise Unfit(f"it has {found.count_bytes():,} bytes, and not {most:,} at most.")
    parts = fitted(form, tensors(found))
    if not finite(parts):
        raise NotFinite("it holds numbers that are not finite.")
    weight, count = float(parts["total"]["weight"]), float(parts["total"].get("count", 1))
    if not 0 < weight <= 1 or count != 1:
        raise Unfit(f"it counts as {count:g} clients of weight {weight:g}.")
    return parts


def _outcome(told: State) -> Outcome:
    """What a client told, as the outcome of a cohort of one; it is finite, or it would have been refused."""
    fine = torch.ones(1, dtype=torch.bool)
    rest: State = {"kept": {}, "hits": None, "exhibit": {}, "seconds": dict, "sound": fine, "keepable": fine}
    return Outcome(**(rest | told))


def _blind(total: State, loss: float, heard: list[int]) -> Gathered:
    """A sum of which no more is known than who is in it, and perhaps their mean loss."""
    local: list[dict[str, float | int]] = [{"client": client} for client in heard]
    return Gathered(total, {}, lambda _: Report(loss, local, {}, {}, [], [], {}))


def arrays(state: State) -> ArrayRecord:
    """A state as Flower carries it."""
    return ArrayRecord({name: value.detach().cpu().contiguous() for name, value in tree.flatten(state).items()})


def tensors(record: ArrayRecord) -> Params:
    """What Flower carried, flat as it came; nothing in it is ever unpickled, and no size believed."""
    return {name: read_array(array.data) for name, array in record.items()}


def server_app(serve: Callable[[dict[str, Any], Callable[[Ready, str, float], Nodes]], None]) -> ServerApp:
    """What runs at the server: `serve` is handed the app's settings, and a way to its nodes."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(dict(context.run_config), functools.partial(Nodes, grid, context))

    return app


def simulate(serve: Callable[[Nodes], None], ready: Ready, prepare: Callable[[], Ready]) -> None:
    """Run `serve` as the server of Flower's simulation engine, with a node for each client, on one core at a time."""
    from flwr.simulation import run_simulation  # takes a second, which a node would wait for at every message

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        serve(Nodes(grid, context, ready))

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    with _quiet():
        run_simulation(
            server,
            client_app(lambda _: prepare()),
            num_supernodes=ready.simulation.cohort.data.clients,
            backend_config={
                "client_resources": resources,
                "init_args": {"num_cpus": os.cpu_count() or 1},
            },
        )


def _bytes(content: RecordDict) -> int:
    """The size of a message's content as it is put on the wire."""
    return int(recorddict_to_proto(content).ByteSize())


def _reason(reply: Message) -> str:
    """Why a node failed, in the words of the exception that it raised, where there is one."""
    said = str(reply.error.reason)
    raised = re.search(r"<class '[^']*'>:<'(.*)'>", said, re.DOTALL)
    lines = [line.strip() for line in (raised[1] if raised else said).splitlines() if line.strip()]
    if lines and "ray::" in lines[0]:  # a traceback, at whose end it stands
        lines = [lines[-1].partition(": ")[2] or lines[-1]]
    return f"the node failed: {' '.join(lines)[:500] or 'it did not say why.'}"


def _listed(refused: dict[int, str]) -> str:
    return "; ".join(f"client {client}: {reason}" for client, reason in sorted(refused.items()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, Flower tells of errors alone; after it, SIGTERM means what it meant, which Ray does not see to."""
    logger, ending = logging.getLogger("flwr"), signal.getsignal(signal.SIGTERM)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
        if threading.current_thread() is threading.main_thread() and ending is not None:
            signal.signal(signal.SIGTERM, ending)
