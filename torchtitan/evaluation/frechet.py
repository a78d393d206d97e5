"""Fréchet distance between two sets of feature vectors, each taken as a Gaussian."""

import numpy as np


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray, weights_b: np.ndarray | None = None) -> float:
    """Distance between the Gaussians fitted to two sets of feature vectors.

    Its estimate from samples is too high, by an amount that grows as a set gets smaller, so two distances can be
    compared only where the sets have the same sizes.

    Args:
        features_a, features_b: one row per image, [N, F] and [M, F], N, M >= 2.
        weights_b: weight of each row of the second set, > 0, [M]; default: equal weights.

    Returns:
        the squared distance of frechet_distance_of_gaussians, with unbiased covariances.

    Raises:
        ValueError: the shapes do not fit, or a set has fewer than two rows or a value that is not finite.
    """
    gaussian_a = _mean_and_covariance("features_a", features_a)
    gaussian_b = _mean_and_covariance("features_b", features_b, weights_b)
    return frechet_distance_of_gaussians(*gaussian_a, *gaussian_b)


def frechet_distance_of_gaussians(
    mean_a: np.ndarray, covariance_a: np.ndarray, mean_b: np.ndarray, covariance_b: np.ndarray
) -> float:
    """Fréchet distance |mean_a - mean_b|² + tr(A + B - 2 (A B)^(1/2)) for the covariances A and B; 0 only if both are
    equal.

    The trace of the root is taken from the eigenvalues of A^(1/2) B A^(1/2), which is symmetric: no complex
    intermediate, and singular covariances need no special care.

    Args:
        mean_a, mean_b: [F].
        covariance_a, covariance_b: [F, F], symmetric, positive semi-definite.

    Returns:
        the squared distance, >= 0, in the features' squared unit.

    Raises:
        ValueError: the shapes do not fit.

    Source: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
    Equilibrium", equation 6.
    """
    if mean_a.shape != mean_b.shape or not covariance_a.shape == covariance_b.shape == mean_a.shape * 2:
        raise ValueError(
            f"the two Gaussians differ in size: means {list(mean_a.shape)} and {list(mean_b.shape)}, "
            f"covariances {list(covariance_a.shape)} and {list(covariance_b.shape)}"
        )
    eigenvalues, vectors = np.linalg.eigh(covariance_a)
    root_a = (vectors * np.sqrt(eigenvalues.clip(min=0))) @ vectors.T  # [F, F]
    trace_of_root = np.sqrt(np.linalg.eigvalsh(root_a @ covariance_b @ root_a).clip(min=0)).sum()
    distance = np.square(mean_a - mean_b).sum() + np.trace(covariance_a) + np.trace(covariance_b) - 2 * trace_of_root
    return max(0.0, float(distance))  # rounding may leave equal Gaussians a little below 0


def _mean_and_covariance(
    name: str, features: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    features = np.asarray(features, dtype=np.float64)
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"{name}: expected at least two rows [N, F], got shape {list(features.shape)}")
    if not np.isfinite(features).all():
        raise ValueError(f"{name}: has values that are not finite")
    covariance = np.atleast_2d(np.cov(features, rowvar=False, aweights=weights))
    return np.average(features, axis=0, weights=weights), covariance
