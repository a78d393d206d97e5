"""Analysis of speed and memory of a folder of runs: tables, effects of switches with intervals, pictures."""
