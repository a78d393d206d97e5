"""Fidelity of samples: images, their features by a network, statistics of references, and distances between them."""
