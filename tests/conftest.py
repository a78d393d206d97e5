"""Order of the test files, packages that none may lack, and what lies in memory before the first test."""

import gc
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import setuptools  # noqa: F401  inductor imports it, which fails once the standard library's distutils is there

# Inductor would try every instruction set of the processor in an interpreter that imports torch, 9 s in each compiling process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
gc.disable()  # until all is imported, see below
# For the processes that are started from here: glibc would give the memory of each large tensor back and ask for it again.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
IN_MEMORY = Path("/dev/shm")  # where what tests force to the disk costs no waiting; some write programs there
if (
    "TMPDIR" not in os.environ and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 4 << 30
    and not os.statvfs(IN_MEMORY).f_flag & (os.ST_NOEXEC | os.ST_RDONLY)
):  # fmt: skip
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(IN_MEMORY)

ROOT = Path(__file__).resolve().parent.parent
# Longest first, on two cores: were one of them begun last, the other core would have nothing left to do.
LONGEST = (
    "tests/distributed/test_layouts.py",
    "tests/distributed/test_lora_layouts.py",
    "tests/end_to_end/test_gns.py",
    "tests/distributed/test_gns_layouts.py",
    "tests/end_to_end/test_launchers.py",
    "tests/end_to_end/test_resume.py",
    "tests/end_to_end/test_flux_pipeline.py",
    "tests/unit/test_estimate.py",
    "tests/end_to_end/test_presets.py",
    "tests/distributed/test_flux_layouts.py",
    "tests/unit/test_gpu_day.py",
    "tests/end_to_end/test_documented_commands.py",
    "tests/distributed/test_numerical_guard.py",
    "tests/end_to_end/test_installed.py",
    "tests/end_to_end/test_sweep.py",
    "tests/end_to_end/test_lost_rank.py",
    "tests/distributed/test_rank_gradients.py",
    "tests/end_to_end/test_autotune.py",
    "tests/unit/test_float8.py",
    "tests/end_to_end/test_python_api.py",
    "tests/unit/test_gns_taps.py",
    "tests/distributed/test_context_parallel.py",
    "tests/distributed/test_normalized_weights.py",
    "tests/end_to_end/test_sweep_process.py",
    "tests/faults/test_outputs.py",
    "tests/distributed/test_ema_and_optimizers.py",
    "tests/distributed/test_edm2_layouts.py",
    "tests/unit/test_bucket_training.py",
    "tests/distributed/test_objective_state.py",
    "tests/distributed/test_absurd_values.py",
    "tests/distributed/test_shard_drawing.py",
    "tests/distributed/test_estimate.py",
    "tests/distributed/test_bucket_layouts.py",
    "tests/faults/test_disks.py",
    "tests/research/test_critical_batch_command.py",
    "tests/research/test_curve_studies.py",
    "tests/research/test_grid_studies.py",
    "tests/research/test_gns_studies.py",
    "tests/research/test_linear_probe_study.py",
)
assert all((ROOT / name).exists() for name in LONGEST), "a file of LONGEST has another name now"


def pytest_collection_modifyitems(items):
    place = {ROOT / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _with_all_packages((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _with_all_packages((yield))


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _with_all_packages(report):
    """Fail what was skipped for a missing package, where only those that TESTS_WITHOUT lists may be missing."""
    lacking = report.skipped and re.search(r"could not import '(\w+)", str(report.longrepr))
    if lacking and lacking[1] not in os.environ.get("TESTS_WITHOUT", lacking[1]).split():
        report.outcome, report.longrepr = "failed", f"{report.longrepr[2]} (scripts/test.sh installs it)"
    return report


def pytest_collection_finish():
    # Garbage of tests is not looked for among torch's objects and the collected tests, as each training would otherwise do.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem and nextitem.path != item.path:  # nor among what the tests of a file imported and traced
        gc.collect()
        gc.freeze()
