"""Entries of a plugin train bit for bit as the program's, on every layout, and resume across layouts."""

from pathlib import Path

import pytest

from tests.launcher import run_on_ranks

TWINS = Path(__file__).resolve().parents[1] / "fixtures/twins.py"
GNS = ("--gns.enable=true", "--gns.num_bins=2", "--gns.interval=1", "--gns.log_interval=1")
OWN = (*GNS, "--objective.weighting.name=soft_min_snr")
OF_PLUGIN = (
    *GNS, f"--job.plugins={TWINS}", "--model.name=twin", "--data.name=twin", "--objective.name=twin", "--optimizer.name=Twin",
    "--objective.weighting.name=twin", "--objective.timesteps.name=twin",
)  # fmt: skip
LAYOUTS = {"DDP": (2, 1), "FSDP2": (1, 2), "HSDP": (2, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_of_a_plugin_train_bit_for_bit_as_the_programs(layout):
    replicas, shards = LAYOUTS[layout]
    case = {"steps": 6, "replicas": replicas, "shards": shards, "accumulation": 1}
    cases = {"own": case | {"overrides": OWN}, "twin": case | {"overrides": OF_PLUGIN}}
    curves = run_on_ranks("tests.distributed.cases:train_all", replicas * shards, {"cases": cases})[0]
    assert len(curves["own"]) == 6 and curves["twin"] == curves["own"]
