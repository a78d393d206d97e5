"""Experiments: grids of runs, with cells in separate processes and their outcomes on record."""
