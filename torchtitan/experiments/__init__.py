"""Grids of runs: cells in processes of their own, with their outcomes on record."""
