"""Profiling: traces of single steps, and their time by kind of work."""
