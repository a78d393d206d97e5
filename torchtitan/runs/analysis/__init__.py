"""What a folder of runs says about speed and memory: tables, effects of switches with intervals, pictures."""
