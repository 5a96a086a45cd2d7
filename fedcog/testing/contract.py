"""What must hold for every algorithm, ours or yours, checked on a little federation."""

import dataclasses
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedcog import settings, tree
from fedcog.algorithms import Algorithm, FedCOG
from fedcog.experiments.config import layers
from fedcog.experiments.prepare import surroundings
from fedcog.experiments.record import Checkpoint, RunDirectory
from fedcog.federation.payloads import joined
from fedcog.federation.rounds import Gathered, Report
from fedcog.testing.federation import Small, worst
from fedcog.tree import Params, State

CLOSE = 1e-9  # in float64, for what is the same but for the order of sums
PARTIAL: dict[str, Any] = {"sizes": (40, 20, 15, 10, 5), "participation": 0.6, "rounds": 3}  # with momentum 0.9
COG = FedCOG(count=8, steps=3, start_round=1, lr=0.1)


def neutral_is_fedavg(algorithm: Algorithm, neutral: Algorithm) -> None:
    """The neutral setting is FedAvg exactly, and the algorithm itself is not."""
    expected = _params(Small(Algorithm(), **PARTIAL))
    got = _params(Small(neutral, **PARTIAL))
    wrong = [name for name in expected if not torch.equal(expected[name], got[name])]
    assert not wrong, f"{neutral} is not FedAvg: {', '.join(wrong)} differ."
    if algorithm != neutral:
        found = _params(Small(algorithm, **PARTIAL))
        same = all(name in found and torch.equal(expected[name], found[name]) for name in expected)
        assert not same, f"{algorithm} is nothing but FedAvg."


def loop_is_vmap(algorithm: Algorithm) -> None:
    """Clients trained one after another end as clients trained together: no hook mixes them up."""
    apart, together = Small(algorithm, "loop", **PARTIAL), Small(algorithm, "vmap", **PARTIAL)
    assert worst(apart.everything(), together.everything()) < CLOSE, "the loop over clients and vmap differ."


def cohort_is_cohorts_of_one(algorithm: Algorithm) -> None:
    """A cohort ends as cohorts of one do, as in a real federation."""
    together, apart = Small(algorithm, "vmap", **PARTIAL), Small(algorithm, "vmap", **PARTIAL)
    gather = apart.backend.gather

    def one_by_one(algorithm: Algorithm, shared: State, clients: Sequence[int], *rest: Any, **named: Any) -> Gathered:
        parts = [gather(algorithm, shared, [client], *rest, **named) for client in clients]
        findings: State = {str(row): part.findings for row, part in enumerate(parts)}

        def settle(read: State) -> Report:
            first, *_ = [part.settle(read[str(row)]) for row, part in enumerate(parts)]
            return first

        return Gathered(joined([part.total for part in parts]), findings, settle)

    apart.backend.gather = one_by_one  # type: ignore[method-assign]
    assert worst(together.everything(), apart.everything()) < CLOSE, "a cohort and cohorts of one differ."


def payloads_add_up(algorithm: Algorithm) -> None:
    """The server gets the same from one sum over all clients as from the sum of two partial sums."""
    server = Small(algorithm, rounds=1).server
    shared = algorithm.broadcast(server)

    def total(clients: list[int]) -> State:
        return Small(algorithm).backend.gather(algorithm, shared, clients, 1, 0.05, None)[0]

    whole, split = total([0, 1, 2]), joined([total([0]), total([1, 2])])
    assert ("each" in whole) == (algorithm.uplink == "each"), "a payload has an 'each' if and only if uplink says so."
    assert float(whole["count"]) == 3, "a payload must hold 'count', one a client."
    draws = Small(algorithm).backend.draws(algorithm, 1)
    after = [tree.flatten(algorithm.server_update(server, one, draws)) for one in (whole, split)]
    assert worst(*after) < CLOSE, "payloads summed in two parts do not come to the whole sum."


def resumes_bit_for_bit(algorithm: Algorithm) -> None:
    """Two rounds, a checkpoint, a third round in a fresh federation: what three rounds in one go come to."""
    straight = Small(algorithm, **PARTIAL).everything()
    first, second = Small(algorithm, **PARTIAL | {"rounds": 2}), Small(algorithm, **PARTIAL)
    before, after = _form(first.server), _form(first.run()[-1].server)
    assert before == after, f"the server ends a round with other state than it began with: {_differ(before, after)}."
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(folder)
        directory.save(Checkpoint(2, first.server, first.backend.store.flatten(), {}))
        checkpoint = directory.load()
    assert checkpoint is not None
    second.server = checkpoint.server
    second.backend.store.restore(checkpoint.clients)
    resumed = second.everything(start=2)
    assert straight.keys() == resumed.keys(), f"a resume loses {sorted(straight.keys() ^ resumed.keys())}."
    wrong = [name for name in straight if not torch.equal(straight[name], resumed[name])]
    assert not wrong, f"after a resume {', '.join(wrong)} differ."


def absent_and_new_clients(algorithm: Algorithm) -> None:
    """Who is absent keeps its state as it was; who never took part starts from what the server sends."""
    small = Small(algorithm, rounds=1)
    shared, store = algorithm.broadcast(small.server), small.backend.store
    small.backend.gather(algorithm, shared, [0, 1], 0, 0.05, None).report()
    kept = {name: value.clone() for name, value in store.flatten().items()}
    small.backend.gather(algorithm, shared, [1], 1, 0.05, None).report()
    after = store.flatten()
    stale = {name for name in kept if name.startswith("0::")}
    assert all(torch.equal(kept[name], after[name]) for name in stale), "an absent client's state changed."
    assert not any(name.startswith("2::") for name in after), "a client that never took part has a state."
    first, last = (_form(small.backend.kept(algorithm, shared, client)) for client in (2, 0))
    assert first == last, f"what a client keeps is not what it starts with: {_differ(first, last)}."


def dormant_fedcog_is_it(algorithm: Algorithm) -> None:
    """FedCOG around it that never wakes changes nothing, to the last bit."""
    if _has_fedcog(algorithm):
        return
    plain = Small(algorithm, **PARTIAL).everything()
    wrapped = Small(dataclasses.replace(COG, inner=algorithm, start_round=99), **PARTIAL).everything()
    wrong = [name for name, value in plain.items() if not torch.equal(value, wrapped[name])]
    assert not wrong, f"under a dormant FedCOG {', '.join(wrong)} differ."


def awake_fedcog_keeps_its_rule(algorithm: Algorithm) -> None:
    """FedCOG around it with no weight on what is generated is still it; with weight, it is something else."""
    if _has_fedcog(algorithm):
        return
    awake = dataclasses.replace(COG, inner=algorithm, start_round=0)
    weightless = dataclasses.replace(awake, weighting="fixed", lambda_kd=0.0)
    alone, plain = Small(algorithm, **PARTIAL).everything(), Small(weightless, **PARTIAL).everything()
    assert worst(alone, {name: plain[name] for name in alone}) < CLOSE, "its rule is lost under an awake FedCOG."
    around = _params(Small(awake, **PARTIAL))
    assert worst(around, _params(Small(algorithm, **PARTIAL))) > CLOSE, "what FedCOG generates has no effect."


def nothing_in_place(algorithm: Algorithm) -> None:
    """No hook writes over what it was given."""
    small = Small(algorithm if _has_fedcog(algorithm) else dataclasses.replace(COG, inner=algorithm, start_round=0))
    shared = small.algorithm.broadcast(small.server)
    before = {name: value.clone() for name, value in tree.flatten(shared).items()}
    small.backend.gather(small.algorithm, shared, [0, 1, 2], 0, 0.05, None).report()
    kept = {name: value.clone() for name, value in small.backend.store.flatten().items()}
    own = small.backend.store.flatten()
    gathered = small.backend.gather(small.algorithm, shared, [0, 1, 2], 1, 0.05, None)
    gathered.report()
    small.algorithm.server_update(small.server, gathered.total, small.backend.draws(small.algorithm, 1))
    touched = [name for name, value in tree.flatten(shared).items() if not torch.equal(before[name], value)]
    touched += [name for name, value in own.items() if not torch.equal(kept[name], value)]
    assert not touched, f"{', '.join(touched)} were written over."


CONTRACT: dict[str, Callable[[Algorithm], None]] = {
    check.__name__: check
    for check in (
        loop_is_vmap,
        cohort_is_cohorts_of_one,
        payloads_add_up,
        resumes_bit_for_bit,
        absent_and_new_clients,
        dormant_fedcog_is_it,
        awake_fedcog_keeps_its_rule,
        nothing_in_place,
    )
}


def check_algorithm(algorithm: Algorithm, neutral: Algorithm | None = None) -> None:
    """Put an algorithm to every test of the contract; an AssertionError tells all that it fails, each with a reason.

    `neutral` is the same algorithm with settings under which it must be FedAvg, to the last bit. It takes some seconds.
    """
    checks: dict[str, Callable[[], None]] = {}
    if neutral is not None:
        checks["neutral_is_fedavg"] = lambda: neutral_is_fedavg(algorithm, neutral)
    for name, check in CONTRACT.items():
        checks[name] = lambda check=check: check(algorithm)  # type: ignore[misc]
    with surroundings(threads=1):
        trouble = settings.unsound(type(algorithm), besides={"inner"}) or _trouble(lambda: _runs(algorithm))
        assert not trouble, f"{type(algorithm).__name__} does not run: {' '.join(trouble)}"
        failed = [f"{name}: {reason}" for name, check in checks.items() for reason in _trouble(check)]
    assert not failed, f"{algorithm} breaks the contract:\n  " + "\n  ".join(failed)


def _runs(algorithm: Algorithm) -> None:
    """Does it get through two rounds, and is there a difference?"""
    plain, found = Small(Algorithm(), **PARTIAL).everything(), Small(algorithm, **PARTIAL).everything()
    same = plain.keys() == found.keys() and all(torch.equal(plain[name], found[name]) for name in plain)
    assert type(algorithm) is Algorithm or not same, (
        "it is nothing but FedAvg: is a hook misspelt, or a setting neutral?"
    )


def _trouble(check: Callable[[], None]) -> list[str]:
    """What goes wrong in a check, if anything: whatever a hook of somebody's own may raise is a finding."""
    try:
        check()
    except AssertionError as error:
        return [str(error).strip() or "an assertion failed."]
    except Exception as error:
        frames, package = traceback.extract_tb(error.__traceback__), Path(tree.__file__).parent
        theirs = [one for one in frames if package not in Path(one.filename).parents and "torch" not in one.filename]
        last = theirs[-1] if theirs else frames[-1]
        reason = (str(error).strip().splitlines() or [""])[0]
        return [f"{type(error).__name__}: {reason} (in {last.name}, line {last.lineno} of {last.filename})."]
    return []


def _form(state: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tree.flatten(state).items()}


def _differ(one: dict[str, Any], other: dict[str, Any]) -> str:
    return ", ".join(sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)))


def _has_fedcog(algorithm: Algorithm) -> bool:
    """FedCOG does not go around itself."""
    return any(isinstance(layer, FedCOG) for _, layer in layers(algorithm))


def _params(small: Small) -> Params:
    params: Params = small.run()[-1].server["params"]
    return params
