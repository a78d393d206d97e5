"""Launchers of runs: on this machine, as Slurm jobs, as Ray tasks."""
