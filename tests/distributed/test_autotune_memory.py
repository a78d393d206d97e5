"""The peak of memory that a summary tells is that of the rank that needs most."""

from tests.launcher import run_on_ranks


def test_summary_tells_the_peak_of_the_fullest_rank():
    first, second = run_on_ranks("tests.distributed.autotune_cases:train_with_ballast", 2, {"ballast_gib": 0.5})
    assert second["before"] > first["after"] + 0.2  # the ballast is there, and on one rank only
    assert first["summary"] == second["summary"]
    assert second["before"] - 0.01 <= first["summary"] <= second["after"] + 0.01
