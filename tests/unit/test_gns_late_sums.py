"""Sums of steps that the host takes later than they were measured."""

import torch

from tests.unit.test_gns_pool import made_up
from torchtitan.gns.step_sums import LateSums

COUNTED, SKIPPED = torch.tensor(False), torch.tensor(True)


def queue(*steps: int, skipped: int = 0) -> LateSums:
    late = LateSums()
    for step in steps:
        late.add(step, made_up(step, measured=step % 3 == 0), SKIPPED if step == skipped else COUNTED)
    return late


def test_steps_arrive_in_order_and_as_they_were_without_skipped_ones():
    late = queue(1, 2, 3, 4, skipped=2)
    assert late.receive() == []
    late.send()
    found = late.receive()
    assert [step for step, _ in found] == [1, 3, 4]
    for step, sums in found:
        wanted = made_up(step, measured=step % 3 == 0)
        assert (sums.sketched is None) == (step != 3)
        for name, value in vars(wanted).items():
            got = getattr(sums, name)
            assert value is None and got is None or torch.equal(got.nan_to_num(7.7), value.nan_to_num(7.7)), name
    assert late.receive() == []


def test_steps_added_after_a_send_wait_for_the_next_one():
    late = queue(1)
    late.send()
    late.add(2, made_up(2, measured=False), COUNTED)
    assert [step for step, _ in late.receive()] == [1]
    late.send()
    assert [step for step, _ in late.receive()] == [2]


def test_clear_drops_what_was_sent_and_what_was_not():
    late = queue(1)
    late.send()
    late.add(2, made_up(2, measured=False), COUNTED)
    late.clear()
    late.send()
    assert late.receive() == []
