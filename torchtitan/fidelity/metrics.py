"""Metrics of sets of feature vectors by name.

    metric = METRICS["fid"]
    samples = FeatureSet("samples", "inception", {"pooled": rows})
    metric.measure(samples, reference, Options()).values["fid"]  # an Interval
"""

from torchtitan.fidelity.measurement import Metric
from torchtitan.settings import Registry

METRICS: Registry[Metric] = Registry("torchtitan.fidelity", {
    "fid": "frechet.FID",
    "sfid": "frechet.SFID",
    "fd_dinov2": "frechet.FD_DINOV2",
    "fd": "frechet.FD",
    "kid": "kid.KID",
    "is": "inception_score.INCEPTION_SCORE",
    "prdc": "prdc.PRDC",
    "accuracy": "accuracy.ACCURACY",
    "memorisation": "memorisation.MEMORISATION",
}, Metric)
