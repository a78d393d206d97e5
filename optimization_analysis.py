"""Analyse speed and memory of a folder of runs: torchtitan_dit/commands/optimization_analysis.py."""

from torchtitan_dit.cli import run_command

if __name__ == "__main__":
    run_command("optimization_analysis")
