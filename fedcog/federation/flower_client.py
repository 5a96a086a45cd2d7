"""The Flower client app: each node trains one client."""

from collections.abc import Callable
from typing import Any

from fedcog.federation.flower_messages import (  # first: it configures Flower before its import
    ANSWER_RECORD,
    BROADCAST_RECORD,
    EVALUATE_KEY,
    REQUEST_RECORD,
    NodeSetup,
    answer_state,
    from_array_record,
    to_array_record,
)

# isort: split
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from fedcog.core.tree import State
from fedcog.engine.aggregation import InvalidPayload, match_template
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.cohort_results import CohortResult
from fedcog.engine.privacy import Privacy
from fedcog.federation import secure_aggregation
from fedcog.federation.node_state import NodeState

__all__ = ["ClientApp", "Context", "client_app"]

SetUp = Callable[[Context], NodeSetup]
"""Sets the experiment up at a node; called at least once per process."""


def client_app(set_up: SetUp) -> ClientApp:
    """Create the app that runs at a node.

    Args:
        set_up: Sets the experiment up at the node.

    Returns:
        Flower's client app.
    """
    app = ClientApp(mods=[_secagg_mod])

    @app.query()
    def _query(message: Message, context: Context) -> Message:
        partition = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": partition}), reply_to=message)

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        setup = set_up(context)
        simulator = setup.simulator
        if bool(setup.secure_scale) != (RECORD_KEY_CONFIGS in message.content):
            raise InvalidPayload(
                "the server and this node do not agree on whether payloads are masked."
            )
        client_id = int(context.node_config["partition-id"])
        spec = _read_spec(message, setup)
        run = str(message.content.config_records[REQUEST_RECORD]["run"])
        privacy = simulator.cohort.privacy
        node_state = NodeState(
            context.node_config.get("state-dir"), run, client_id, _answers_once(privacy)
        )
        if "kept" in context.state:
            node_state.restore(from_array_record(context.state.array_records["kept"]))
        new_state = simulator.new_client_state(spec.algorithm, spec.broadcast, client_id)
        before = node_state.before_round(spec.round, new_state)
        result, after = simulator.train_client(spec, client_id, before)
        if setup.secure_scale:
            reply = _masked_reply(result, setup)
        else:
            answer: State = {"total": result.total} if privacy else answer_state(result)
            reply = RecordDict({ANSWER_RECORD: to_array_record(answer)})
        saved = node_state.save(spec.round, before, after)
        context.state["kept"] = to_array_record(saved)
        return Message(reply, reply_to=message)

    return app


def _read_spec(message: Message, setup: NodeSetup) -> RoundSpec:
    """Read a round from the server's message, and check that it fits this node."""
    simulator, algorithm, secure_scale = setup
    request: dict[str, Any] = dict(message.content.config_records[REQUEST_RECORD])
    input_shape = list(simulator.cohort.model.input_shape)
    if input_shape != request["shape"]:
        raise InvalidPayload(
            f"this node's examples have shape {input_shape}, but the federation's have "
            f"{request['shape']}."
        )
    received = from_array_record(message.content.array_records[BROADCAST_RECORD])
    template = algorithm.broadcast(simulator.init_server(algorithm))
    return RoundSpec(
        algorithm=algorithm,
        broadcast=match_template(template, received),
        round=int(request["round"]),
        lr=float(request["lr"]),
        evaluate_local=bool(request[EVALUATE_KEY]) and not secure_scale,
    )


def _answers_once(privacy: Privacy | None) -> bool:
    """Return whether a repeated answer would spend unaccounted privacy."""
    return privacy is not None and privacy.noise_at == "local" and not privacy.simulated


def _masked_reply(result: CohortResult, setup: NodeSetup) -> RecordDict:
    """Encode a payload for secure aggregation; Flower masks it."""
    is_private = setup.simulator.cohort.privacy is not None  # then the loss would reveal too much
    loss = result.loss[0] * result.total["weight"] * (not is_private)
    vector = secure_aggregation.to_vector(
        result.total, loss, setup.algorithm.payload_bounds, setup.secure_scale
    )
    fit_result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector.numpy()]), 1, {})
    return fitres_to_recorddict(fit_result, keep_input=True)


def _secagg_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Apply Flower's SecAgg+ protocol at a node, if the server uses it."""
    if RECORD_KEY_CONFIGS in message.content:
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)
