"""The Flower client app: each node trains one client."""

from collections.abc import Callable
from typing import Any, cast

from fedcog.federation.flower_messages import (  # first: it configures Flower before its import
    ANSWER_RECORD,
    BROADCAST_RECORD,
    COUNT_BOUNDS,
    EVALUATE_KEY,
    EVALUATE_ONLY_KEY,
    MAX_TEST_EXAMPLES,
    MODEL_RECORD,
    REQUEST_RECORD,
    RESUM_KEY,
    SURVEY_KEY,
    NodeSetup,
    answer_state,
    evaluation_state,
    from_array_record,
    masked_counts,
    to_array_record,
)

# isort: split
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from torch import Tensor

from fedcog.core import tree
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import InvalidPayload, match_template
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.cohort_results import CohortResult
from fedcog.engine.privacy import Privacy
from fedcog.federation import secure_aggregation
from fedcog.federation.backend import ClientEvaluation
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

    @app.evaluate()
    def _evaluate(message: Message, context: Context) -> Message:
        setup = set_up(context)
        if setup.secure_scale:
            raise InvalidPayload("this node evaluates only if its counts are masked.")
        answer = evaluation_state(_evaluate_models(message, context, setup))
        reply = RecordDict({ANSWER_RECORD: to_array_record(answer)})
        return Message(reply, reply_to=message)

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        setup = set_up(context)
        simulator = setup.simulator
        if bool(setup.secure_scale) != (RECORD_KEY_CONFIGS in message.content):
            raise InvalidPayload(
                "the server and this node do not agree on whether payloads are masked."
            )
        if message.content.config_records[REQUEST_RECORD].get(EVALUATE_ONLY_KEY):
            evaluation = _evaluate_models(message, context, setup)
            return Message(_masked_evaluation(evaluation, setup), reply_to=message)
        if message.content.config_records[REQUEST_RECORD].get(RESUM_KEY):
            return Message(_resum_reply(message, context, setup), reply_to=message)
        if message.content.config_records[REQUEST_RECORD].get(SURVEY_KEY):
            return Message(_survey_reply(message, context, setup), reply_to=message)
        client_id = int(context.node_config["partition-id"])
        spec = _read_spec(message, setup)
        privacy = simulator.cohort.privacy
        node_state = _node_state(message, context, privacy)
        new_state = simulator.new_client_state(spec.algorithm, spec.broadcast, client_id)
        before = node_state.before_round(spec.round, new_state)
        result, after = simulator.train_client(spec, client_id, before)
        if setup.algorithm.num_resums:
            content: State = {"round": torch.tensor(spec.round), "payload": result.total}
            context.state["payload"] = to_array_record(content)
            result = result._replace(total=setup.algorithm.first_payload(result.total))
        if setup.secure_scale:
            reply = _masked_reply(result, setup)
        else:
            answer: State = {"total": result.total} if privacy else answer_state(result)
            reply = RecordDict({ANSWER_RECORD: to_array_record(answer)})
        saved = node_state.save(spec.round, before, after)
        context.state["kept"] = to_array_record(saved)
        return Message(reply, reply_to=message)

    return app


def _resum_reply(message: Message, context: Context, setup: NodeSetup) -> RecordDict:
    """Answer with this client's part of a further sum of the round."""
    algorithm = setup.algorithm
    round = int(cast(Any, message.content.config_records[REQUEST_RECORD]["round"]))
    known: Params = {}
    if "payload" in context.state:
        known = from_array_record(context.state.array_records["payload"])
    if not known or int(known.pop("round")) != round:
        raise InvalidPayload(f"this node has no update of round {round + 1}.")
    last: State = tree.unflatten(known)["payload"]
    received = from_array_record(message.content.array_records[BROADCAST_RECORD])
    broadcast = match_template(algorithm.resum_broadcast(last), received)
    answer = algorithm.resum_payload(last, broadcast)
    content: State = {"round": torch.tensor(round), "payload": last | answer}
    context.state["payload"] = to_array_record(content)
    return _part_reply(answer, setup)


def _survey_reply(message: Message, context: Context, setup: NodeSetup) -> RecordDict:
    """Answer with the sum of the algorithm's survey over this node's training examples."""
    simulator = setup.simulator
    if simulator.cohort.privacy is not None:
        raise InvalidPayload("this node's examples are private: it answers no survey.")
    template = setup.algorithm.server_model(simulator.init_server(setup.algorithm))
    received = from_array_record(message.content.array_records[MODEL_RECORD])
    weights = match_template(template, received)
    client_id = int(context.node_config["partition-id"])
    return _part_reply(simulator.survey_clients(setup.algorithm, weights, [client_id]), setup)


def _part_reply(part: State, setup: NodeSetup) -> RecordDict:
    """Encode this client's part of a sum, for Flower to mask if sums are masked."""
    if not setup.secure_scale:
        return RecordDict({ANSWER_RECORD: to_array_record(part)})
    no_loss = torch.zeros(())
    bounds = setup.algorithm.payload_bounds
    return _to_masked_record(
        secure_aggregation.to_vector(part, no_loss, bounds, setup.secure_scale)
    )


def _node_state(message: Message, context: Context, privacy: Privacy | None) -> NodeState:
    """Return what this node keeps of its client."""
    run = str(message.content.config_records[REQUEST_RECORD]["run"])
    client_id = int(context.node_config["partition-id"])
    node_state = NodeState(
        context.node_config.get("state-dir"), run, client_id, _answers_once(privacy)
    )
    if "kept" in context.state:
        node_state.restore(from_array_record(context.state.array_records["kept"]))
    return node_state


def _evaluate_models(message: Message, context: Context, setup: NodeSetup) -> ClientEvaluation:
    """Evaluate the global model, and this client's own, on this node's test examples."""
    simulator = setup.simulator
    privacy = simulator.cohort.privacy
    tests = simulator.cohort.data.local_tests
    client_id = int(context.node_config["partition-id"])
    if privacy is not None or tests is None:
        raise InvalidPayload(
            "this node has no test examples of its own, or keeps private how models do on them: "
            "server and nodes need the same --local-test, and no --privacy."
        )
    if int(tests.sizes[client_id]) > MAX_TEST_EXAMPLES:
        raise InvalidPayload(f"this node has over {MAX_TEST_EXAMPLES:,} test examples: use fewer.")
    spec = _read_spec(message, setup)
    template = setup.algorithm.server_model(simulator.init_server(setup.algorithm))
    received = from_array_record(message.content.array_records[MODEL_RECORD])
    weights = match_template(template, received)
    new_state = simulator.new_client_state(spec.algorithm, spec.broadcast, client_id)
    state = _node_state(message, context, privacy).before_round(spec.round + 1, new_state)
    simulator.client_states.put([client_id], [state], [True])
    return simulator.evaluate_models(
        spec.algorithm, weights, spec.broadcast, spec.round, [client_id]
    )


def _masked_evaluation(evaluation: ClientEvaluation, setup: NodeSetup) -> RecordDict:
    """Encode counts and scores for secure aggregation; Flower masks them."""
    payload = masked_counts(evaluation, setup.simulator.cohort.task)
    vector = secure_aggregation.to_vector(payload, torch.zeros(()), COUNT_BOUNDS, 1.0)
    return _to_masked_record(vector)


def _to_masked_record(vector: Tensor) -> RecordDict:
    """Return a vector in the form that Flower masks."""
    fit_result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector.numpy()]), 1, {})
    return fitres_to_recorddict(fit_result, keep_input=True)


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
    return _to_masked_record(vector)


def _secagg_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Apply Flower's SecAgg+ protocol at a node, if the server uses it."""
    if RECORD_KEY_CONFIGS in message.content:
        return secaggplus_mod(message, context, call_next)
    return call_next(message, context)
