"""Learning rate schedules against torch's own."""

import re
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from fedcog.core.lr_schedules import LRSchedule

ROUNDS = 12
BASE = 0.4
Scheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def linear_warmup(rounds: int, after: Scheduler) -> Scheduler:
    """Rise to the full learning rate, then follow another schedule from its beginning."""

    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        warmup = lr_scheduler.LinearLR(optimizer, 1 / (rounds + 1), total_iters=rounds)
        return lr_scheduler.SequentialLR(optimizer, [warmup, after(optimizer)], [rounds])

    return make


def cosine(duration: int, final: float) -> Scheduler:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, duration, BASE * final)


def linear(duration: int, final: float) -> Scheduler:
    return lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, final, duration)


def exponential(decay: float) -> Scheduler:
    return lambda optimizer: lr_scheduler.ExponentialLR(optimizer, decay)


def step(every: int, decay: float) -> Scheduler:
    return lambda optimizer: lr_scheduler.StepLR(optimizer, every, decay)


def constant(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("schedule", "scheduler"),
    [
        (LRSchedule("exponential", decay=0.9), exponential(0.9)),
        (LRSchedule("constant", decay=0.9), constant),
        (LRSchedule("step", decay=0.3, step=4), step(4, 0.3)),
        (LRSchedule("cosine", final=0.1, horizon=ROUNDS), cosine(ROUNDS - 1, 0.1)),
        (LRSchedule("linear", final=0.1, horizon=ROUNDS), linear(ROUNDS - 1, 0.1)),
        (LRSchedule("linear", final=0.1, horizon=5), linear(4, 0.1)),
        (LRSchedule("exponential", decay=0.9, warmup=3), linear_warmup(3, exponential(0.9))),
        (LRSchedule("step", decay=0.3, step=4, warmup=2), linear_warmup(2, step(4, 0.3))),
        (
            LRSchedule("cosine", final=0.05, horizon=ROUNDS, warmup=3),
            linear_warmup(3, cosine(ROUNDS - 4, 0.05)),
        ),
        (
            LRSchedule("linear", final=0.05, horizon=ROUNDS, warmup=3),
            linear_warmup(3, linear(ROUNDS - 4, 0.05)),
        ),
    ],
)
def test_schedule_is_torchs(schedule: LRSchedule, scheduler: Scheduler) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], BASE)
    reference = scheduler(optimizer)
    expected = []
    for _ in range(ROUNDS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    rates = [BASE * schedule.factor(round) for round in range(ROUNDS)]
    assert rates == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_factor_is_exact_at_both_ends_and_stays(kind: str) -> None:
    schedule = LRSchedule(kind, final=0.01, horizon=7)  # type: ignore[arg-type]
    assert schedule.factor(0) == 1
    assert schedule.factor(6) == schedule.factor(7) == schedule.factor(100) == 0.01


def test_single_round_has_the_full_learning_rate() -> None:
    assert LRSchedule("cosine", final=0.01, horizon=1).factor(0) == 1


def test_old_rule_is_bit_equal() -> None:
    schedule = LRSchedule(decay=0.97)
    assert [0.3 * schedule.factor(round) for round in range(50)] == [
        0.3 * 0.97**round for round in range(50)
    ]


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        (LRSchedule("step", decay=0.1), "lr_schedule step needs the rounds .*--lr-step 10"),
        (LRSchedule("step", step=3), "lr_schedule step needs the factor .*--lr-decay 0.1"),
        (LRSchedule("cosine", warmup=4, horizon=5), "lr_warmup 4 leaves no rounds"),
    ],
)
def test_faults_name_the_remedy(schedule: LRSchedule, fault: str) -> None:
    (found,) = schedule.faults()
    assert re.search(fault, found)
    (server,) = schedule.faults("server_")
    assert server.startswith("server_lr_")
