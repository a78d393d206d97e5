"""The clock of a run: every nanosecond in exactly one part, through resumes and rollbacks."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from torchtitan.trainer import Trainer
from torchtitan.training.clock import PARTS, TRAIN_PARTS, ClockTotals, Phases, RunClock

SECOND = 10**9


class HandClock:
    """A clock that stands still until it is advanced."""

    def __init__(self):
        self.time = 0

    def __call__(self):
        return self.time


def totals(steps=0, **parts):
    return ClockTotals({name: round(parts.get(name, 0) * SECOND) for name in PARTS}, steps)


def test_nested_phases_are_exclusive_and_add_up():
    hand = HandClock()
    clock = RunClock(hand, started=-7)
    phases = Phases(hand, clock.switch)
    hand.time = 3
    with phases("start"):
        hand.time += 5
    hand.time += 1
    with phases("finish"):
        hand.time += 20
        with phases("evaluation"):
            hand.time += 300
            with phases("waiting"):
                hand.time += 4000
            hand.time += 100
        hand.time += 10
    with phases("a phase that the clock does not know"):
        hand.time += 2
    found = clock.totals()
    wanted = {"start_up": 10 + 5, "reports": 30, "evaluation": 400, "waiting": 4000, "other": 3}
    assert {name: ns for name, ns in found.parts.items() if ns} == wanted
    assert found.wall_ns == hand.time + 7


def test_a_phase_left_by_an_exception_is_counted_once():
    hand = HandClock()
    clock = RunClock(hand)
    phases = Phases(hand, clock.switch)
    with pytest.raises(ValueError), phases("forward"), phases("encode"):
        hand.time += 6
        raise ValueError
    hand.time += 1
    assert clock.totals() == totals(encode=6e-9, other=1e-9)


def test_training_alone_is_the_parts_of_a_step_and_the_rates_name_both():
    found = totals(
        steps=30, start_up=20, data=1, encode=50, forward=2, backward=3, gradients=4, optimizer=5, averages=6, waiting=9,
        validation=100, repeated=100,
    )
    shown = found.summary()
    assert shown["train_seconds"] == 30 and shown["wall_seconds"] == 300
    assert shown["steps_per_second_train"] == 1 and shown["steps_per_second_wall"] == 0.1
    assert sum(shown[name] for name in PARTS) == shown["wall_seconds"]
    point = found.metrics()
    assert point["clock/train(s)"] == sum(point[f"clock/{name}(s)"] for name in TRAIN_PARTS) == 30
    assert point["clock/steps"] == 30


def test_work_left_on_the_device_counts_as_training_and_not_as_what_follows(monkeypatch):
    hand = HandClock()
    clock = RunClock(hand)
    trainer = object.__new__(Trainer)
    trainer.phases, trainer.profiler = Phases(hand, clock.switch), SimpleNamespace()
    trainer.state = SimpleNamespace(layout=SimpleNamespace(device=torch.device("cuda")))
    queue = [70]

    def synchronize(device):
        hand.time += queue.pop()
        queue.append(0)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for name in ("validation", "checkpoint"):
        with trainer._beside_training(name):
            hand.time += 5
    assert clock.totals() == totals(waiting=70e-9, validation=5e-9, saving=5e-9)
    assert clock.totals().train_ns == 70


def test_a_step_that_compiles_counts_as_the_start_and_not_as_a_step():
    hand = HandClock()
    clock = RunClock(hand)
    phases = Phases(hand, clock.switch)
    for compiles in (True, False):
        before = clock.totals()
        with phases("forward"):
            hand.time += 9 * SECOND
        with phases("report"):
            hand.time += SECOND
        clock.steps += 1
        if compiles:
            clock.count_as_start(before)
    assert clock.totals() == totals(1, start_up=9, forward=9, reports=2)


# --- resume


def test_a_resumed_process_adds_its_own_time():
    hand = HandClock()
    clock = RunClock(hand)
    hand.time = 3 * SECOND
    clock.resume(totals(steps=4, start_up=5, forward=4))
    hand.time = 4 * SECOND
    assert clock.totals() == totals(4, start_up=5 + 4, forward=4)


def test_a_rollback_in_the_process_loses_no_nanosecond():
    hand = HandClock()
    clock = RunClock(hand)
    phases, checkpoint = Phases(hand, clock.switch), totals(4, start_up=5, forward=4)
    clock.resume(checkpoint)
    clock.steps += 3
    with phases("forward"):
        hand.time += 3 * SECOND
    with phases("checkpoint"):
        hand.time += 2 * SECOND
    hand.time += SECOND
    clock.roll_back(checkpoint)
    assert clock.totals() == totals(4, start_up=5, forward=4, saving=2, repeated=3 + 1)
    assert clock.totals().wall_ns == 9 * SECOND + hand.time


# --- the start of the process


def test_the_clock_of_a_process_starts_with_the_process():
    code = (
        "import time; time.sleep(0.3); from torchtitan.training.clock import process_start; "
        "print((time.perf_counter_ns() - process_start()) / 1e9)"
    )
    started = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(found.stdout) <= time.monotonic() - started + 0.02
