"""Model card of a run for the Hugging Face hub: facts from its record, and how to sample from its weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.config.job import JobConfig
from torchtitan.evaluation.targets import described_text
from torchtitan.pictures.markdown import Markdown, inline, markdown_table
from torchtitan.pictures.number_text import significant
from torchtitan.runs.trained_model import TrainedModel

WEIGHTS, PICTURE = "weights.safetensors", "samples.png"
_SCORES = {
    "loss_metrics/global_avg_loss": "training loss, median of the last half",
    "validation_metrics/loss": "held-out loss of the trained weights",
}


def model_card(
    trained: TrainedModel, recorded: Mapping[str, Any], summary: Mapping[str, Any], repository: str, picture: bool
) -> str:
    """Write the card as Markdown with a header of YAML.

    Args:
        trained: the weights.
        recorded: tables of the run's config.toml. `trained.config` does not tell how it was trained where its data are gone.
        summary: content of the run's summary.json; empty: the card has no losses and no hardware.
        repository: name on the hub, for the commands.
        picture: whether PICTURE lies beside it.

    Source: Mitchell et al., "Model cards for model reporting", arXiv 1810.03993; the header is that of the hub.
    """
    condition = "class-conditional" if trained.info.num_classes else "unconditional"
    header = "---\nlibrary_name: torchtitan-dit\npipeline_tag: unconditional-image-generation\ntags:\n- diffusion\n---\n\n"
    title = f"# {inline(repository.rpartition('/')[2])}\n\n"
    words = f"A {condition} diffusion model, {inline(trained.label)}.\n\n"
    shown = f"![Samples at the end of training]({PICTURE})\n\n" if picture else ""
    table = markdown_table(["", ""], _facts(trained, recorded, summary))
    names = trained.info.class_names
    more = ", ..." if len(names) > 20 else ""
    classes = f"Classes: {', '.join(map(inline, names[:20]))}{more}\n\n" if names else ""
    word, argument = (" --autoencoder-path PATH", ', autoencoder_path="PATH"') if trained.config.autoencoder.path else ("", "")
    code = (
        "## Samples\n\n"
        f"    torchtitan-dit sample {repository}{word}\n\n"
        "or in Python\n\n"
        f'    from torchtitan_dit import load\n    load("{repository}"{argument}).grid().save("samples.png")\n\n'
        f"`{WEIGHTS}` has the configuration in its header; it needs neither the run nor its data.\n"
    )
    return header + title + words + shown + table + classes + code


def _facts(
    trained: TrainedModel, recorded: Mapping[str, Any], summary: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    config, info = trained.config, trained.info
    data, training, optimizer = (recorded.get(name, {}) for name in ("data", "training", "optimizer"))
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    yield "model", f"{config.model.name}, {config.model.flavor}, {parameters:,} parameters"
    shape, dataset = " x ".join(map(str, info.image_shape)), inline(str(data.get("name", "unknown")))
    yield "data", f"{dataset}, {shape}, {info.num_classes or 'no'} classes"
    yield "objective", _objective(config)
    if trained.step is not None and {"global_batch_size", "mixed_precision_param"} <= training.keys():
        batch, dtype = training["global_batch_size"], training["mixed_precision_param"]
        more = " and more" if training.get("double_batch_after") else ""
        yield "training", f"{trained.step:,} steps of {batch:,} images{more}, {inline(dtype)}"
    if {"name", "lr"} <= optimizer.keys():
        yield "optimizer", f"{inline(optimizer['name'])}, learning rate {optimizer['lr']:g}"
    if summary.get("step") != trained.step:
        return  # its numbers are of other weights
    medians = summary.get("tail_medians", {})
    for key, name in _SCORES.items():
        value = summary.get(key, medians.get(key) if isinstance(medians, Mapping) else None)
        if isinstance(value, int | float):
            yield name, significant(float(value))
    measured = summary.get("evaluation")
    if isinstance(measured, Mapping) and measured.get("step") == trained.step:
        for name, described in measured.items():
            if isinstance(described, Mapping):
                yield inline(name), described_text(described)
    if isinstance(device := summary.get("device"), str):
        yield "hardware", device
    yield "images seen", f"{summary.get('n_images_seen', 0):,}"


def _objective(config: JobConfig) -> Markdown:
    objective = config.objective
    return inline(f"{objective.prediction} on {objective.path}, {objective.preconditioning} preconditioning")
