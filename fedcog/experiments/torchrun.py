"""A run that several processes share: one carries it out, and the others train what it sends them."""

import contextlib
import functools
import json
from typing import TYPE_CHECKING, Any, cast

from fedcog.experiments.prepare import Prepared
from fedcog.experiments.turns import Interrupted, Running
from fedcog.federation.ranks import Ranks
from fedcog.federation.rounds import Diverged

if TYPE_CHECKING:
    from fedcog.experiments.run import Run


@functools.cache
def _ranks() -> Ranks:
    """The processes that torchrun started."""
    return Ranks()


def led(running: Running) -> "Run | Diverged":
    """The run, each of its rounds gathered from all processes, who are told when it is over.

    Of what goes wrong in the midst of a round nobody is told: this process ends, and torchrun ends the others.
    """
    together, words = _ranks(), dict[str, Any]()
    with contextlib.closing(running):
        try:
            turn = next(running)
            while True:
                turn = running.send(together.gather(turn.backend, turn.algorithm, turn.work))
        except StopIteration as end:
            done = cast("Run", end.value)
            words = {"lines": json.dumps(done.lines)}
            return done
        except Diverged as error:
            words = {"diverged": str(error), "round": error.round}
            return error
        except Interrupted:
            words = {"interrupted": True}
            raise
        finally:
            if words:
                together.end(words)


def followed(prepared: Prepared) -> list[dict[str, Any]]:
    """The lines of a run as another process carried it out, with this one's help."""
    algorithm = prepared.experiment.algorithm
    try:
        over = _ranks().follow(prepared.backend, algorithm, algorithm.broadcast(prepared.server))
    finally:
        prepared.backend.cohort.close()
    if "diverged" in over:
        raise Diverged([], over["round"], over["diverged"])
    if "lines" not in over:
        raise Interrupted("stopped")
    lines: list[dict[str, Any]] = json.loads(over["lines"])
    return lines
