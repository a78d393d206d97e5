"""Snapshots of averages on every layout: those of one process, and written again bit for bit after a resume."""

from pathlib import Path

import pytest
import torch

from tests.distributed.snapshot_cases import SWEEP, train_with_snapshots
from tests.end_to_end.runs import checkpoint_tensors
from tests.end_to_end.tools import caller, load_tool
from tests.launcher import run_on_ranks
from torchtitan.weights.post_hoc_ema import reconstruct, stored_averages

CASES = "tests.distributed.snapshot_cases"
LAYOUTS = ("DDP x 2", "FSDP x 2", pytest.param("HSDP 2 x 2", marks=pytest.mark.long))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("snapshots")
    train_with_snapshots(str(place), "one process")
    changed = run_on_ranks(f"{CASES}:on_two_ranks", 2, {"folder": str(place), "output": str(place / "on-2.txt")})
    assert changed == [[], []]  # the resumed run wrote the same bytes again
    return place


@pytest.fixture(scope="module")
def trained_on_four(folder) -> None:
    layout = {"folder": str(folder), "name": "HSDP 2 x 2", "replicas": 2, "shards": 2}
    run_on_ranks(f"{CASES}:train_with_snapshots", 4, layout)


def trained(layout: str, request) -> None:
    if layout == "HSDP 2 x 2":
        request.getfixturevalue("trained_on_four")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_snapshot_holds_the_run_s_averages_bit_for_bit(folder, layout, request):
    trained(layout, request)
    for step in (4, 8):
        snapshot = checkpoint_tensors(folder / layout / "ema" / "snapshots" / f"step-0000000{step}")
        checkpoint = checkpoint_tensors(folder / layout / "checkpoint" / f"step-0000000{step}")
        averages = {name for name in checkpoint if name.startswith("ema.")}
        assert {name for name in snapshot if name.startswith("ema.")} == averages and averages
        assert all(torch.equal(snapshot[name], checkpoint[name]) for name in averages)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reconstruction_is_that_of_one_process(folder, layout, request):
    trained(layout, request)
    shards = list((folder / layout / "ema" / "snapshots" / "step-00000008").glob("shard-*"))
    assert len(shards) == 2  # of HSDP the first copy alone writes
    wanted, found = (
        dict(reconstruct(stored_averages(folder / name), 0.075).tensors()) for name in ("one process", layout)
    )
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)


def test_sweep_on_two_ranks_has_the_scores_of_one(folder, capsys):
    code, output, _ = caller(load_tool("ema"), capsys)("sweep", folder / "FSDP x 2", *SWEEP)
    one, two = output.splitlines(), (folder / "on-2.txt").read_text().splitlines()
    assert code == 0 and len(one) == len(two) == 3 and one[-1] == two[-1]
    for mine, theirs in zip(one[:2], two[:2], strict=True):
        assert float(mine.split()[1].strip(":")) == pytest.approx(float(theirs.split()[1].strip(":")), rel=1e-5)
