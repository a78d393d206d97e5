"""Prompts of a command line: texts that a trained model is sampled with, encoded as its captions were."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

import torch

from torchtitan.conditions import POOLED, TEXT, Embeddings, Texts
from torchtitan.data import DATASETS
from torchtitan.data.trigger_words import PLACEHOLDER, filled
from torchtitan.distributed.mesh import compute_device
from torchtitan.errors import LatentStoreError
from torchtitan.pictures.number_text import counted
from torchtitan.texts import TextEncoderError, reopen_encoders
from torchtitan.texts.opening import OPTIONS, open_encoders
from torchtitan.weights.trained_model import TrainedModel, WeightsError

_ENCODERS = {TEXT: "the text encoder", POOLED: "the pooled text encoder"}


def add_prompt_options(parser: argparse._ActionsContainer) -> None:
    """Add --prompt and the places of the encoders."""
    add = parser.add_argument
    add("--prompt", nargs="+", metavar="TEXT", help="texts to draw, for models of captions, [trigger] replaced by the run's "
        "data.trigger_word: one row of the grid each, or those of a set, by turns (default: the run's prompts)")
    for entry, option in OPTIONS.items():
        add(option, default="", metavar="ENCODER", help=f"folder or hub name of {_ENCODERS[entry]} of the run's captions; "
            "needed for texts that are no captions of the run's data (default: of a pipeline's folder, the one in it)")


def places(arguments: argparse.Namespace) -> dict[str, str]:
    """Places of the encoders that were given, by entry. Raises WeightsError: they have no effect."""
    found = {entry: getattr(arguments, option[2:].replace("-", "_")) for entry, option in OPTIONS.items()}
    given = {entry: place for entry, place in found.items() if place}
    if given and not arguments.prompt:
        raise WeightsError(f"{OPTIONS[next(iter(given))]}: has no effect without --prompt")
    return given


def filled_prompts(trained: TrainedModel, prompts: Sequence[str]) -> list[str]:
    """Prompts with each "[trigger]" replaced by the trigger word of the model's data; others stay as they are.

    Raises:
        WeightsError: the model takes texts, a prompt has "[trigger]", and there is no word.
    """
    if not isinstance(trained.info.condition_kind, Embeddings):
        return list(prompts)
    word = trained.config.data.trigger_word
    try:
        lines = [filled(prompt, word) for prompt in prompts]
    except ValueError as error:
        raise WeightsError(f"--prompt: {error}") from error
    return [line if PLACEHOLDER.search(prompt) else prompt for line, prompt in zip(lines, prompts, strict=True)]


def with_prompts(trained: TrainedModel, prompts: Sequence[str], places: Mapping[str, str]) -> TrainedModel:
    """Copy of a trained model, of the same network, with the choices of `info` these prompts instead of its data's.

    The names of the choices are those of `filled_prompts`. Captions of the run's data are read from its store.

    Args:
        places: of the encoders, see `reopen_encoders`.

    Raises:
        WeightsError: the model takes no text, or a prompt cannot be encoded as its captions were.
    """
    data, kind = trained.config.data, trained.info.condition_kind
    prompts = filled_prompts(trained, prompts)
    if isinstance(kind, Texts):
        if places:
            raise WeightsError(f"{OPTIONS[next(iter(places))]}: the run's data name their own encoders (leave it out)")
        return _prompted(trained, kind, prompts, kind.encode(list(prompts)))
    if isinstance(kind, Embeddings) and trained.record.elsewhere:
        return _encoded(trained, kind, prompts, {**trained.encoders, **places})
    store = DATASETS[data.name].store(data) if trained.record.latents and not trained.record.elsewhere else None
    if not isinstance(kind, Embeddings) or store is None or store.captions is None:
        raise WeightsError(f"--prompt: the model was trained on {kind.wanted}, not on encoded captions (leave it out)")
    plan = store.captions.plan
    try:
        numbers = {prompt: store.captions.number_of(prompt) for prompt in dict.fromkeys(prompts)}
        known = {prompt: store.captions.read([number]) for prompt, number in numbers.items() if number is not None}
        if places and len(known) == len(numbers):
            option = OPTIONS[next(iter(places))]
            raise WeightsError(f"{option}: has no effect on captions of the run's data, which are encoded (leave it out)")
        if new := [prompt for prompt, number in numbers.items() if number is None]:
            encoders = reopen_encoders(plan.encoders, places, plan.text_shape[0], compute_device())
            encoded, cut = encoders.encode(new)
            trained = _with_cut(trained, cut, encoders.length)
            for place, prompt in enumerate(new):
                known[prompt] = {name: value[place : place + 1] for name, value in encoded.items()}
    except LatentStoreError as error:
        raise WeightsError(f"--prompt: {error}") from error
    except TextEncoderError as error:
        raise WeightsError(str(error)) from error
    rows = {
        name: torch.cat([known[prompt][name].to(dtype) for prompt in prompts]) for name, (_, dtype) in kind.entries.items()
    }
    return _prompted(trained, kind, prompts, rows)


def check_prompted(trained: TrainedModel) -> None:
    """Check that there is something to draw. Raises WeightsError: the weights come without captions, and no prompt is given."""
    kind = trained.info.condition_kind
    if isinstance(kind, Embeddings) and not kind.choices and trained.record.elsewhere:
        raise WeightsError("; ".join(("--prompt: not given, and these weights come without captions", *trained.warnings)))


def _encoded(
    trained: TrainedModel, kind: Embeddings, prompts: Sequence[str], places: Mapping[str, str]
) -> TrainedModel:
    """Model without its data with these prompts, encoded as its captions were, of a published one in bfloat16 as stores are."""
    record = trained.record
    for entry, option in OPTIONS.items():
        if entry not in places and not record.encoders:
            raise WeightsError(f"{option}: not given, and the weights come without {_ENCODERS[entry]} (a folder or hub name)")
    length = kind.entries[TEXT][0][0]
    try:
        if record.encoders:
            encoders = reopen_encoders(record.encoders, places, length, compute_device())
        else:
            encoders = open_encoders(places[TEXT], places[POOLED], length, torch.bfloat16, compute_device())
        encoded, cut = encoders.encode([record.null_caption, *prompts])
    except TextEncoderError as error:
        raise WeightsError(str(error)) from error
    for entry, (shape, dtype) in kind.entries.items():
        encoded[entry] = encoded[entry].to(dtype)
        if (width := encoded[entry].shape[-1]) != shape[-1]:
            raise WeightsError(f"{OPTIONS[entry]}: {places.get(entry, 'it')} has width {width}, this model takes {shape[-1]}")
    kind = dataclasses.replace(kind, nulls={entry: values[0] for entry, values in encoded.items()})
    rows = {entry: values[1:] for entry, values in encoded.items()}
    return _prompted(_with_cut(trained, cut, length), kind, prompts, rows)


def _with_cut(trained: TrainedModel, cut: list[str], length: int) -> TrainedModel:
    text = f"--prompt: {counted(len(cut), 'text')} longer than {length} tokens {'is' if len(cut) == 1 else 'are'} cut"
    return dataclasses.replace(trained, warnings=(*trained.warnings, text)) if cut else trained


def _prompted(
    trained: TrainedModel, kind: Embeddings, prompts: Sequence[str], rows: dict[str, torch.Tensor]
) -> TrainedModel:
    # The network keeps the kind of its data: a loaded model is drawn from again, with other prompts or with none.
    prompted = dataclasses.replace(kind, prompts=rows, names=tuple(prompts))
    return dataclasses.replace(trained, info=dataclasses.replace(trained.info, condition_kind=prompted))
