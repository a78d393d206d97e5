"""Profiling: traces of single steps, and snapshots of CUDA's memory."""
