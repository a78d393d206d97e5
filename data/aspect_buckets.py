"""Aspect buckets: sizes of images of about one area and many aspect ratios, and the one that fits an image best."""

import math
from functools import lru_cache

STEP = 64  # pixels; every side of a bucket is a multiple
BASE = 1024  # resolution of BASE_SIZES
BASE_SIZES = (
    (1024, 1024),
    (2048, 512), (1984, 512), (1920, 512), (1856, 512), (1792, 576), (1728, 576), (1664, 576), (1600, 640), (1536, 640),
    (1472, 704), (1408, 704), (1344, 704), (1344, 768), (1280, 768), (1216, 832), (1152, 832), (1152, 896), (1088, 896),
    (1088, 960), (1024, 960),
    (960, 1024), (960, 1088), (896, 1088), (896, 1152), (832, 1152), (832, 1216), (768, 1280), (768, 1344), (704, 1408),
    (704, 1472), (640, 1536), (640, 1600), (576, 1664), (576, 1728), (576, 1792), (512, 1856), (512, 1920), (512, 1984),
    (512, 2048),
    (8192, 128), (128, 8192),
)  # fmt: skip


@lru_cache(maxsize=64)
def bucket_sizes(resolution: int) -> tuple[tuple[int, int], ...]:
    """Sizes of the buckets of a resolution: BASE_SIZES times resolution / 1024, rounded down to multiples of 64.

    Args:
        resolution: root of the area, in pixels, >= 64.

    Returns:
        (width, height) in pixels, each size once; sizes with a side below 64 are left out.

    Source: Podell et al., "SDXL", Appendix I (40 sizes), with two for panoramas as in trainers of Flux adapters.
    """
    scaled = [tuple(side * resolution // BASE // STEP * STEP for side in size) for size in BASE_SIZES]
    return tuple(dict.fromkeys((width, height) for width, height in scaled if width and height))


@lru_cache(maxsize=1 << 16)  # photographs come in few sizes
def bucket_of(width: int, height: int, resolution: int) -> tuple[int, int] | None:
    """Choose the bucket for an image that is resized to cover it and cut to it.

    It is the bucket that cuts away the fewest pixels, among those that the image covers without being enlarged.

    Args:
        resolution: root of the buckets' area, in pixels, >= 64.

    Returns:
        (width, height) of the bucket; None where the image has a smaller area than resolution^2, or covers no bucket.
    """
    if width * height < resolution**2:
        return None
    covered = [size for size in bucket_sizes(resolution) if size[0] <= width and size[1] <= height]
    return min(covered, key=lambda size: _pixels_cut(width, height, *size), default=None)


def own_size(width: int, height: int, resolution: int) -> tuple[int, int] | None:
    """Size of an image that covers no bucket: its own, at most resolution^2 pixels, rounded down to multiples of 64; or None."""
    scale = min(1.0, resolution / math.sqrt(width * height))
    size = int(width * scale) // STEP * STEP, int(height * scale) // STEP * STEP
    return size if all(size) else None


def _pixels_cut(width: int, height: int, bucket_width: int, bucket_height: int) -> int:
    """Pixels cut away times width x height: an integer, so that equal cuts compare as equal.

    The image is scaled by s = max(bucket_width / width, bucket_height / height), and s^2 width height pixels become
    bucket_width bucket_height.
    """
    across, down = bucket_width * height, bucket_height * width
    return abs(across - down) * max(across, down)
