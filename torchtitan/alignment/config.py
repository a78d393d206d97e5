"""`[alignment]`: its keys, and unsupported combinations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.settings import OneOf, Registry, setting

# Encoders of images by name: a function of `alignment.path` and a device; on the meta device none reads weights.
ENCODERS: Registry = Registry("torchtitan.alignment", {
    "digits": "encoders.open_digits",
    "cifar10": "encoders.open_cifar10",
    "dinov2": "encoders.open_dinov2",
    "transformers": "encoders.open_transformers",
})
TEACHERS = ("none", "self", "stored", *ENCODERS)
PROJECTORS: Registry = Registry("torchtitan.alignment", {
    "mlp": "projectors.MLPProjector",
    "convolution": "projectors.ConvolutionProjector",
})
_ON = {"teacher": TEACHERS[1:]}
_SELF = {"teacher": ("self",)}


@dataclass(kw_only=True)
class AlignmentConfig:
    """`[alignment]`"""

    teacher: OneOf[str, TEACHERS] = setting(
        "none", "features that tokens are aligned with: of the run's own average (self), of data.features_path (stored), or of a "
        "frozen encoder of the images",
    )
    path: str = setting(
        "", "encoder's weights: a folder or hub name of transformers' models, the file of dinov2 (default: the downloaded one)",
        applies={"teacher": ("dinov2", "transformers")}, path=True,
    )
    block: int = setting(4, "block of which the output is aligned, from 1", ge=1, applies=_ON)
    teacher_block: int = setting(8, "block of the average of which the output is the target, from 1", ge=1, applies=_SELF)
    dual_share: float = setting(
        0.0, "share of an image's tokens at a second time, drawn as the first, published: 0.25; 0: none", ge=0, le=0.5,
        applies=_SELF,
    )  # fmt: skip
    track: str = setting("ema", "average that teaches, a name of ema.tracks", applies=_SELF)
    projector: OneOf[str, PROJECTORS] = setting(
        "mlp", "layers between tokens and features: three linears (REPA), or a 3x3 convolution (iREPA)", applies=_ON
    )
    spatial_norm: float | None = setting(
        None, "normalise features over an image's tokens, less this share of their mean, as 0.6; default: they stay as they are",
        ge=0, le=1, applies=_ON,
    )
    weight: float = setting(0.5, "factor on the alignment's loss", ge=0, applies=_ON)
    stop_steps: int = setting(
        0, "steps of training.global_batch_size images after which the alignment ends; 0: never", ge=0, applies=_ON
    )
    stop_images: int = setting(0, "images after which the alignment ends; 0: never", ge=0, applies=_ON)

    @property
    def encodes_images(self) -> bool:
        return self.teacher in ENCODERS

    def steps(self, total: int, global_batch_size: int) -> int:
        """Aligned steps out of a run's, each of the first batch size."""
        of_images = -(-self.stop_images // global_batch_size)
        return min(self.stop_steps or of_images or total, total)


def alignment_problems(
    config: AlignmentConfig, *, tracks: Sequence[str], channels: int, latents: bool, features: bool, buckets: bool,
    context_parallel: bool, whole_graph: bool, routed: range = range(0),
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Find what an alignment cannot be trained with: (key of the section, reason).

    Args:
        channels: of the images.
        latents: the data are latents of a store.
        features: a teacher's features come with the images.
        whole_graph: the network is compiled as one graph.
        routed: blocks, from 1, that see a part of the tokens.
    """
    teacher = config.teacher
    if teacher == "none":
        return
    if teacher == "self" and config.track not in tracks:
        yield "track", f"{config.track!r} is no name of ema.tracks (there are: {', '.join(tracks) or 'none'})"
    if teacher in ENCODERS and latents:
        text = f"{teacher} encodes images, and the data are stored latents, which hold none"
        yield "teacher", f"{text} (set it to self, or to stored with data.features_path)"
    elif teacher in ENCODERS and channels not in (1, 3):
        yield "teacher", f"{teacher} encodes images of 1 or 3 channels, and these have {channels} (set it to self)"
    if teacher == "stored" and not features:
        yield "teacher", "stored reads a store of features, which data.features_path names, of data.name = latents (give it)"
    if teacher == "transformers" and not config.path:
        yield "path", "is missing (give the folder or hub name of a vision transformer, as facebook/dinov2-base)"
    if config.stop_steps and config.stop_images:
        yield "stop_images", "the end is given by alignment.stop_steps too (remove one of the two)"
    if buckets:
        yield "teacher", f"{teacher} needs images of one shape, and these are in buckets (set it to none, or use other data)"
    if context_parallel:
        text = f"{teacher} needs all tokens of an image, which parallelism.context_parallel_degree divides (set that to 1)"
        yield "teacher", text
    if config.block in routed:
        text = f"block {config.block} sees a part of the tokens, as {routed[0]} to {routed[-1]} do, by model.routing"
        yield "block", f"{text} (choose another)"
    if whole_graph:
        yield "teacher", f"{teacher} reads a block's output, inside the graph of compile.scope = model (set that to blocks)"
