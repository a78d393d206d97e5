"""Whether freed memory of the host stays with the process, seen by the system's count of faults."""

import os
import platform
import subprocess
import sys

# Allocates and frees forty blocks of 2 MiB, ten times; prints whether memory is kept, and faults after the first time.
PROGRAM = """
import resource
from torchtitan.processes.host_allocator import keep_freed_memory
kept = keep_freed_memory()
faults = []
for _ in range(10):
    blocks = [bytes(2**21) + b"x" for _ in range(40)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(kept, faults[-1] - faults[0])
"""


def run(**environment: str) -> tuple[bool, int]:
    chosen = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=chosen | environment, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


def test_freed_memory_is_kept_with_glibc_unless_the_environment_chose():
    glibc = platform.libc_ver()[0] == "glibc"
    kept, faults = run()
    chosen, faults_of_choice = run(MALLOC_TRIM_THRESHOLD_=str(2**17))
    assert (kept, chosen) == (glibc, False)
    if glibc:
        assert faults < 2000 < faults_of_choice  # 10,000 pages each time
