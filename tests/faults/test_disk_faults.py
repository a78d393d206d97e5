"""A disk or a folder that fails under a run with pictures on costs no step, no point and no good checkpoint."""

import pytest

from tests.faults.cut_disk import CannotMount
from tests.faults.disk_faults import FAULTS, WAYS, outcome

# The others take a few minutes together.
ALWAYS = [("file system in error, read-only", "to the end"), ("a bit flipped in each manifest", "for a time")]
CASES = [
    pytest.param(name, way, id=f"{name}, {way}", marks=[] if (name, way) in ALWAYS else pytest.mark.long)
    for name in FAULTS for way in WAYS
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_fault_of_the_disk_ends_no_training_and_leaves_a_good_checkpoint(name, way):
    try:
        assert outcome(name, way) == []
    except CannotMount as error:
        pytest.skip(str(error))
