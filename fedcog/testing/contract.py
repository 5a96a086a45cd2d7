"""The contract that every algorithm must satisfy, checked on toy federations."""

import dataclasses
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fedcog
from fedcog.algorithms import Algorithm, FedCOG
from fedcog.core import settings, tree
from fedcog.core.tree import Params, State
from fedcog.engine.aggregation import add_totals
from fedcog.engine.cohort import RoundSpec
from fedcog.engine.cohort_results import CohortResult, join_cohorts
from fedcog.federation.simulator import Simulator
from fedcog.models.checks import ModelError
from fedcog.runs.config.experiment import Experiment
from fedcog.runs.environment import torch_settings
from fedcog.runs.records.checkpoint import Checkpoint
from fedcog.runs.records.run_directory import RunDirectory
from fedcog.testing.toy_federation import ToyFederation, max_difference, norm_dropout_network

TOLERANCE = 1e-9
"""Largest difference, in float64, of results that differ in the order of sums only."""
PARTIAL: dict[str, Any] = {"sizes": (40, 20, 15, 10, 5), "participation": 0.6, "rounds": 3}
"""Settings with partial participation."""
FEDCOG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)
"""A quick FedCOG to wrap algorithms with."""


NETWORKS: dict[str, dict[str, Any]] = {
    "": {},
    " on a network with BatchNorm and dropout": {"module": norm_dropout_network},
}
"""Settings of the networks that checks use, by what their messages add."""


def neutral_equals_fedavg(algorithm: Algorithm, neutral: Algorithm) -> None:
    """Check that the neutral settings give FedAvg exactly, and the algorithm itself does not.

    Running statistics of BatchNorm count too: only the pass over the client's own examples may move
    them.

    Args:
        algorithm: The algorithm.
        neutral: The same algorithm with neutral settings.

    Raises:
        AssertionError: If it does not hold.
    """
    for network, options in NETWORKS.items():
        expected = _final_model(ToyFederation(Algorithm(), **PARTIAL, **options))
        actual = _final_model(ToyFederation(neutral, **PARTIAL, **options))
        wrong = [name for name in expected if not torch.equal(expected[name], actual[name])]
        assert not wrong, f"{neutral} is not FedAvg{network}: {', '.join(wrong)} differ."
    if algorithm != neutral:
        expected = _evaluated_model(ToyFederation(Algorithm(), **PARTIAL))
        params = _evaluated_model(ToyFederation(algorithm, **PARTIAL))
        is_same = all(
            name in params and torch.equal(value, params[name]) for name, value in expected.items()
        )
        assert not is_same, f"{algorithm} equals FedAvg."


def loop_equals_vmap(algorithm: Algorithm) -> None:
    """Check that clients trained one by one end like clients trained at once."""
    for network, options in NETWORKS.items():
        loop = ToyFederation(algorithm, "loop", **PARTIAL, **options).final_state()
        vmap = ToyFederation(algorithm, "vmap", **PARTIAL, **options).final_state()
        difference = max_difference(loop, vmap)
        assert difference < TOLERANCE, f"the loop over clients and vmap differ{network}."


def cohort_equals_cohorts_of_one(algorithm: Algorithm) -> None:
    """Check that a cohort ends like cohorts of one client, as in a real federation."""
    together = ToyFederation(algorithm, "vmap", **PARTIAL)
    apart = ToyFederation(algorithm, "vmap", **PARTIAL)
    apart.server.backend = _OneByOne(apart.simulator)
    difference = max_difference(together.final_state(), apart.final_state())
    assert difference < TOLERANCE, "a cohort and cohorts of one differ."


class _OneByOne(Simulator):
    """A simulator that trains every client as a cohort of one."""

    def __init__(self, simulator: Simulator) -> None:
        vars(self).update(vars(simulator))

    def train(
        self, spec: RoundSpec, client_ids: Sequence[int], max_clients: int = 0
    ) -> tuple[CohortResult, list[State]]:
        """Train clients one by one, and join their results.

        Returns:
            The joined result without states, and each client's new state.
        """
        trained = [super(_OneByOne, self).train(spec, [client_id]) for client_id in client_ids]
        new_states = [state for _, states in trained for state in states]
        return join_cohorts([result for result, _ in trained]), new_states


def payloads_add_up(algorithm: Algorithm) -> None:
    """Check that one sum over all clients equals the sum of two partial sums for the server."""
    server = ToyFederation(algorithm, rounds=1).server.state
    full = _sum_in_parts(algorithm, server, [[0, 1, 2]])
    split = _sum_in_parts(algorithm, server, [[0], [1, 2]])
    assert ("per_client" in full) == (algorithm.uplink == "per_client"), (
        "a payload has a 'per_client' part if and only if uplink says so."
    )
    assert float(full["count"]) == 3, "a payload must hold 'count', 1 per client."
    draws = ToyFederation(algorithm).simulator.server_draws(algorithm, 1)
    states = [
        tree.flatten(algorithm.server_update(server, algorithm.aggregate(payloads), draws))
        for payloads in (full, split)
    ]
    assert max_difference(*states) < TOLERANCE, "payloads summed in two parts give another result."


def _sum_in_parts(algorithm: Algorithm, server: State, parts: list[list[int]]) -> State:
    """Return the sum of the clients' payloads of round 2, as a sum of partial sums."""
    simulator = ToyFederation(algorithm).simulator
    spec = RoundSpec(algorithm, algorithm.broadcast(server), 1, 0.05, False, keep_payloads=True)
    payloads = {}
    for client_ids in parts:
        result, _ = simulator.train(spec, client_ids)
        for row, client_id in enumerate(client_ids):
            payloads[client_id] = tree.take(result.payloads, row)

    def sum_of(values: dict[int, State]) -> State:
        return add_totals(
            [
                simulator.cohort.sum_payloads([values[id] for id in ids], [True] * len(ids))
                for ids in parts
            ]
        )

    total = sum_of({id: algorithm.first_payload(value) for id, value in payloads.items()})
    for _ in range(algorithm.num_resums):
        broadcast = algorithm.resum_broadcast(total)
        answers = {id: algorithm.resum_payload(value, broadcast) for id, value in payloads.items()}
        total = total | sum_of(answers)
        payloads = {id: value | answers[id] for id, value in payloads.items()}
    return total


def resume_is_exact(algorithm: Algorithm) -> None:
    """Check that two rounds, a checkpoint and a third round equal three rounds without a break."""
    straight = ToyFederation(algorithm, **PARTIAL).final_state()
    first = ToyFederation(algorithm, **PARTIAL | {"rounds": 2})
    before = tree.specs(first.server.state)
    first.run()
    after = tree.specs(first.server.state)
    assert before == after, (
        f"the server state changes its form in a round: {_changed_names(before, after)}."
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(folder)
        states = first.simulator.client_states.flatten()
        directory.save(Checkpoint(2, first.server.state, states, {}))
        checkpoint = directory.load()
    assert checkpoint is not None
    second = ToyFederation(algorithm, **PARTIAL)
    second.server.state = checkpoint.server
    second.simulator.client_states.restore(checkpoint.clients)
    resumed = second.final_state(start=2)
    lost = sorted(straight.keys() ^ resumed.keys())
    assert not lost, f"a resumed run loses {lost}."
    wrong = [name for name in straight if not torch.equal(straight[name], resumed[name])]
    assert not wrong, f"after a resume {', '.join(wrong)} differ."


def absent_clients_keep_state(algorithm: Algorithm) -> None:
    """Check that absent clients keep their state, and new ones start from the broadcast."""
    toy = ToyFederation(algorithm, rounds=1)
    broadcast = algorithm.broadcast(toy.server.state)
    states = toy.simulator.client_states
    toy.run_clients([0, 1], 0, broadcast)
    before = {name: value.clone() for name, value in states.flatten().items()}
    toy.run_clients([1], 1, broadcast)
    after = states.flatten()
    absent = [name for name in before if name.startswith("0::")]
    assert all(torch.equal(before[name], after[name]) for name in absent), (
        "the state of an absent client changed."
    )
    assert not any(name.startswith("2::") for name in after), (
        "a client that never took part has a state."
    )
    new = tree.specs(toy.simulator.client_state(algorithm, broadcast, 2))
    old = tree.specs(toy.simulator.client_state(algorithm, broadcast, 0))
    assert new == old, f"the client state changes its form: {_changed_names(new, old)}."


def one_pass_moves_statistics(algorithm: Algorithm) -> None:
    """Check that a local step moves BatchNorm's statistics as FedAvg's does: by one pass.

    Algorithms of which a client trains only a part of the model have other statistics, and so have
    those whose server applies something else than the clients' mean.
    """
    if algorithm.sends_coverage or not algorithm.applies_mean:
        return
    one_step: dict[str, Any] = {"sizes": (20,), "steps": 1, "rounds": 1}
    buffers = []
    for one in (Algorithm(), algorithm):
        toy = ToyFederation(one, module=norm_dropout_network, **one_step)
        toy.run()
        buffers.append(toy.server.state["buffers"])
    expected, actual = buffers
    wrong = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    assert not wrong, (
        f"after one step {', '.join(wrong)} differ from FedAvg's: only the pass over the client's "
        "own examples may move them. Use client.teacher_logits or client.logits for others."
    )


def inactive_fedcog_changes_nothing(algorithm: Algorithm) -> None:
    """Check that FedCOG around it that never starts changes nothing, to the last bit."""
    if _has_fedcog(algorithm):
        return
    wrapped = dataclasses.replace(FEDCOG, inner=algorithm, start_round=99)
    expected = ToyFederation(algorithm, **PARTIAL).final_state()
    actual = ToyFederation(wrapped, **PARTIAL).final_state()
    wrong = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    assert not wrong, f"under an inactive FedCOG {', '.join(wrong)} differ."


def active_fedcog_keeps_the_rule(algorithm: Algorithm) -> None:
    """Check that FedCOG without weight on generated inputs keeps the rule, and with weight acts."""
    if _has_fedcog(algorithm):
        return
    active = dataclasses.replace(FEDCOG, inner=algorithm, start_round=0)
    weightless = dataclasses.replace(active, weighting="fixed", lambda_kd=0.0)
    for network, options in NETWORKS.items():
        expected = ToyFederation(algorithm, **PARTIAL, **options).final_state()
        actual = ToyFederation(weightless, **PARTIAL, **options).final_state()
        common = {name: actual[name] for name in expected}
        difference = max_difference(expected, common)
        assert difference < TOLERANCE, f"FedCOG around it loses its rule{network}."
    with_fedcog = _final_params(ToyFederation(active, **PARTIAL))
    without = _final_params(ToyFederation(algorithm, **PARTIAL))
    difference = max_difference(with_fedcog, without)
    assert difference > TOLERANCE, "FedCOG around it has no effect."


def nothing_is_written_in_place(algorithm: Algorithm) -> None:
    """Check that no hook writes over its arguments."""
    if not _has_fedcog(algorithm):
        algorithm = dataclasses.replace(FEDCOG, inner=algorithm, start_round=0)
    toy = ToyFederation(algorithm)
    broadcast = algorithm.broadcast(toy.server.state)
    sent = {name: value.clone() for name, value in tree.flatten(broadcast).items()}
    toy.run_clients([0, 1, 2], 0, broadcast)
    states = toy.simulator.client_states.flatten()
    kept = {name: value.clone() for name, value in states.items()}
    result = toy.run_clients([0, 1, 2], 1, broadcast)
    draws = toy.simulator.server_draws(algorithm, 1)
    algorithm.server_update(toy.server.state, algorithm.aggregate(result.total), draws)
    now = tree.flatten(broadcast)
    changed = [name for name, value in now.items() if not torch.equal(sent[name], value)]
    changed += [name for name, value in states.items() if not torch.equal(kept[name], value)]
    assert not changed, f"{', '.join(changed)} were written in place."


CONTRACT: dict[str, Callable[[Algorithm], None]] = {
    check.__name__: check
    for check in (
        loop_equals_vmap,
        cohort_equals_cohorts_of_one,
        payloads_add_up,
        resume_is_exact,
        absent_clients_keep_state,
        one_pass_moves_statistics,
        inactive_fedcog_changes_nothing,
        active_fedcog_keeps_the_rule,
        nothing_is_written_in_place,
    )
}
"""Every check by name."""


def check_algorithm(algorithm: Algorithm, neutral: Algorithm | None = None) -> None:
    """Check an algorithm against the whole contract, which takes some seconds.

    Args:
        algorithm: The algorithm.
        neutral: The same algorithm with settings under which it must equal FedAvg exactly.

    Raises:
        AssertionError: If a check fails; it lists all failures with reasons.

    Example:
        ```python
        from fedcog import FedProx
        from fedcog.testing import check_algorithm

        check_algorithm(FedProx(mu=0.1), neutral=FedProx(mu=0.0))
        ```
    """
    with torch_settings(Experiment(threads=1)):
        faults = settings.check_class(type(algorithm), ignored={"inner"})
        faults = faults or _failures(lambda: _check_runs(algorithm))
        assert not faults, f"{type(algorithm).__name__} does not run: {' '.join(faults)}"
        failed = []
        if neutral is not None:
            reasons = _failures(lambda: neutral_equals_fedavg(algorithm, neutral))
            failed += [f"neutral_equals_fedavg: {reason}" for reason in reasons]
        for name, check in CONTRACT.items():
            reasons = _failures(lambda check=check: check(algorithm))  # type: ignore[misc]
            failed += [f"{name}: {reason}" for reason in reasons]
    assert not failed, f"{algorithm} breaks the contract:\n  " + "\n  ".join(failed)


def _check_runs(algorithm: Algorithm) -> None:
    """Check that an algorithm runs, and differs from FedAvg."""
    fedavg = ToyFederation(Algorithm(), **PARTIAL).final_state()
    actual = ToyFederation(algorithm, **PARTIAL).final_state()
    is_same = fedavg.keys() == actual.keys() and all(
        torch.equal(value, actual[name]) for name, value in fedavg.items()
    )
    assert type(algorithm) is Algorithm or not is_same, (
        "it equals FedAvg: is a hook misspelled, or a setting neutral?"
    )


def _failures(check: Callable[[], None]) -> list[str]:
    """Return why a check fails; anything that a user's hook raises counts."""
    try:
        check()
    except AssertionError as error:
        return [str(error).strip() or "an assertion failed."]
    except ModelError as error:
        return [str(error)]
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        package = Path(fedcog.__file__).parent
        user_frames = [
            frame
            for frame in frames
            if package not in Path(frame.filename).parents and "torch" not in frame.filename
        ]
        last = (user_frames or frames)[-1]
        reason = (str(error).strip().splitlines() or [""])[0]
        return [
            f"{type(error).__name__}: {reason} (in {last.name}, line {last.lineno} of "
            f"{last.filename})."
        ]
    return []


def _changed_names(first: dict[str, Any], second: dict[str, Any]) -> str:
    names = first.keys() | second.keys()
    return ", ".join(sorted(name for name in names if first.get(name) != second.get(name)))


def _has_fedcog(algorithm: Algorithm) -> bool:
    """Return whether FedCOG is part of an algorithm; it cannot wrap itself."""
    return algorithm.generation_start is not None


def _final_model(toy: ToyFederation) -> Params:
    """Run a federation, and return its final parameters and running statistics."""
    toy.run()
    weights: Params = toy.server.state["params"] | toy.server.state["buffers"]
    return weights


def _evaluated_model(toy: ToyFederation) -> Params:
    """Run a federation, and return the model that is evaluated and saved."""
    toy.run()
    return toy.algorithm.server_model(toy.server.state)


def _final_params(toy: ToyFederation) -> Params:
    toy.run()
    params: Params = toy.server.state["params"]
    return params
