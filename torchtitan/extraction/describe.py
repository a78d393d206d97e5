"""Description of a store in words."""

from pathlib import Path

from torchtitan.latents.index import SKIPPED_FILE, StoreIndex
from torchtitan.processes.command_line import readable_size

MOST_FIGURES = 1024  # of a normalisation: more are those of each element


def describe_store(folder: Path, index: StoreIndex) -> list[str]:
    """Describe a store's content in lines for readers."""
    made = "features" if index.of_features else "the latent"
    kept = ("mean and standard deviation" if index.posterior else made) + (
        " of each image and of its mirror image" if index.mirrored else " of each image"
    )
    size = sum(file.size for file in index.files().values())
    left_out = index.num_source_images - index.num_images
    step = f" in steps of {index.int8_step:.6g}" if index.int8_step else ""
    classes = f"{index.num_classes}{' with names' if index.class_names else ''}" if index.num_classes else "none"
    pixels = f", of {index.image_size}x{index.image_size} pixels" if index.image_size else ""
    skipped = [f"  left out       {left_out:,}, unreadable or without a label: reasons in {SKIPPED_FILE}"] if left_out else []
    return [
        f"{folder}: {index.num_images:,} images{pixels}, {readable_size(size)} in {len(index.files())} files",
        *skipped,
        f"  kept           {kept}, {'x'.join(map(str, index.shape))}, {index.dtype}{step}",
        f"  classes        {classes}",
        *_captions(index),
        f"  autoencoder    {', '.join(f'{key} {value}' for key, value in index.autoencoder.items())}",
        *([] if index.of_features else _normalization(index)),  # features are read as they are
    ]


def _normalization(index: StoreIndex) -> list[str]:
    return [
        f"  normalization  {index.normalization.source}",
        f"    shift        {_figures(index.normalization.shift)}",
        f"    scale        {_figures(index.normalization.scale)}",
    ]


def _captions(index: StoreIndex) -> list[str]:
    plan = index.captions
    if plan is None:
        return []
    made = "one for every image" if plan.source == "image" else "made from the names of classes"
    names = ", ".join(f"{entry} {identity['name']}" for entry, identity in plan.encoders.items())
    (length, width), (pooled,) = plan.text_shape, plan.pooled_shape
    shapes = f"{length} tokens of {width} and a whole text's {pooled}, {plan.dtype}"
    return [f"  captions       {plan.num_texts:,} texts with the null caption, {made}; {shapes}; {names}"]


def _figures(values: list[float]) -> str:
    more = f" ... ({len(values):,}, one of each element)" if len(values) > MOST_FIGURES else ""
    return " ".join(f"{value:.4g}" for value in values[:MOST_FIGURES]) + more
