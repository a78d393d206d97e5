"""Fidelity: metrics of sets of feature vectors."""
