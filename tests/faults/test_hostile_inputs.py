"""Inputs made by an enemy are refused in a line or survived; nothing else is started, taken or touched."""

import os
import shutil
from pathlib import Path

import pytest

from tests.faults import hostile_case
from tests.faults.hostile_case import CASES, Case, attempt
from tests.faults.hostile_inputs import ordinary
from tests.faults.hostile_process import AttackedPrograms
from tests.faults.hostile_strace import run_traced

# What the processes of their own show that forks do not: linking to libraries, C code that opens files, exits.
TRACED = (
    "image: PostScript named .png", "tar: a name that climbs", "pickle: os.system, protocol 0",
    "npy: objects that are calls, decoded",
    "run: checkpoints among folders of the user's", "run: metrics.jsonl is a link to metrics of the user's",
    "weights: a pickled call of os.system", "compare: names of markup", "sweep: a fixed job.dump_folder",
)  # fmt: skip


@pytest.fixture(scope="module")
def programs():
    attacked = AttackedPrograms()
    yield attacked
    attacked.close()


@pytest.mark.parametrize("name", ordinary())
def test_a_hostile_input_is_refused_or_survived(name, programs):
    attempt(CASES[name], programs)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CASES if name not in ordinary()])
def test_each_other_hostile_input_is_refused_or_survived(name, programs):
    attempt(CASES[name], programs)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("name", TRACED)
def test_the_kernel_sees_a_process_start_and_touch_nothing_else(name, programs):
    attempt(CASES[name], programs, run=run_traced)


def test_a_watched_process_that_does_what_it_must_not_is_found(programs):
    """The watch itself: a program that writes elsewhere, starts another, takes memory, hangs."""
    wrong = {
        "print('x\\x1b[2J')": "control character", "open(place + '/precious/x', 'w')": "precious",
        "import os; os.system('true')": "os.system", "bytearray(2 << 30)": "GiB", "raise ValueError": "traceback",
        "import time; time.sleep(99)": "still at work",
        "import os; os.remove(place + '/precious/thesis.txt')": "thesis",
    }  # fmt: skip
    for code, words in wrong.items():

        def make(place: hostile_case.Place, code: str = code) -> tuple[str, ...]:
            program = place.input / "program.py"
            program.write_text(f"place = {str(place.folder)!r}\n{code}\n")
            return (str(program),)

        seconds = 1.0 if words == "still at work" else 30.0
        with pytest.raises(hostile_case.Failed, match=words):
            attempt(Case("none", "none", make, (hostile_case.SURVIVED,), seconds=seconds), programs)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs the scheduler's times of a process")
def test_waits_for_a_processor_do_not_count_as_the_inputs_time(programs):
    def make(place: hostile_case.Place) -> tuple[str, ...]:
        program = place.input / "program.py"
        program.write_text("import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass\n")
        return (str(program),)

    case = Case("none", "none", make, (hostile_case.SURVIVED,), before=_share_a_processor, seconds=1.5)
    attempt(case, programs)


def _share_a_processor() -> None:
    """Two rivals take two thirds of the one processor on which this process then runs."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for _ in range(2):
        if os.fork() == 0:  # of the command's process group, which is killed when the command ends
            while True:
                pass
