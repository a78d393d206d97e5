"""Processes: launch variables, exit codes, and the ends of commands."""
