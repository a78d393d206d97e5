"""Profiling: traces of single steps, and where their time went."""
