"""Conditions of a network: none, a class, or embeddings.

A dataset declares its kind, a family of networks the kinds that it takes. All code between them, from the loader to the
solvers, passes conditions on unchanged and operates on them through their kind.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from torchtitan.device_tables import DeviceTables

# Entries of a text condition: one vector per token [L, D], and one vector of the whole text [P].
TEXT, POOLED = "text", "pooled"
# Entry of a text that is not encoded yet: its letters in UTF-8, uint8 [bytes], and zeros behind them.
CAPTION = "caption"

# Conditions of a batch, images first in each tensor: None without a condition, the tensor itself where a kind has one
# entry, and a mapping where it has several.
Condition = Tensor | dict[str, Tensor] | None

# Entries of a batch by name: the shape of one image's value, and its dtype.
Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]


class ConditionKind(ABC):
    """Entries of a batch that condition a network, and operations on them; wanted: a dataset's condition in words."""

    name: ClassVar[str]
    wanted: ClassVar[str]
    choices_noun: ClassVar[str] = "classes"

    @property
    @abstractmethod
    def entries(self) -> Entries:
        """Entries of a condition."""

    @property
    def batch_entries(self) -> Entries:
        """Entries of a batch from which `of` makes those of the condition; most often the same."""
        return self.entries

    @property
    def choices(self) -> int:
        """Number of conditions that sampling chooses from by number; 0 where there is nothing to choose."""
        return 0

    @property
    def choice_names(self) -> tuple[str, ...]:
        """One name per choice, or none."""
        return ()

    def number_of(self, word: str | int) -> int | None:
        """Number of a choice by its name, or by its number where no name is a number; None: there is no such choice."""
        word = str(word)
        if word in self.choice_names:
            return self.choice_names.index(word)
        if not re.fullmatch(r"-?\d{1,18}", word):
            return None
        numbered = {int(name): place for place, name in enumerate(self.choice_names) if is_number(name)}
        if numbered:
            return numbered.get(int(word))
        return int(word) if 0 <= int(word) < max(self.choices, 1) else None

    def numbers_of(self, words: Sequence[str | int]) -> list[int]:
        """Numbers of choices that are known to exist, as `number_of`."""
        return [number for number in map(self.number_of, words) if number is not None]

    @abstractmethod
    def choose(self, numbers: Tensor) -> Condition:
        """Conditions of the choices `numbers` [B]."""

    def problem(self, batch: Mapping[str, Tensor]) -> str | None:
        """Problem of the values of a batch with the right shapes and dtypes; None if there is none."""
        return None

    @abstractmethod
    def of(self, batch: Mapping[str, Tensor]) -> Condition:
        """Conditions in a batch."""

    @abstractmethod
    def drop(self, condition: Condition, dropped: Tensor) -> Condition:
        """Replace the condition by the null condition where `dropped` [B] is true."""

    @abstractmethod
    def with_null(self, condition: Condition) -> Condition:
        """Conditions of twice the batch: those given, then as many null conditions."""

    def placeholder(self, count: int, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Entries of a batch in which nothing but shapes and dtypes counts."""
        return placeholder(self.batch_entries, count, device)


@dataclass(frozen=True)
class Unconditional(ConditionKind):
    """No condition."""

    name = "none"
    wanted = "no condition"

    @property
    def entries(self) -> Entries:
        return {}

    def of(self, batch: Mapping[str, Tensor]) -> Condition:
        return None

    def drop(self, condition: Condition, dropped: Tensor) -> Condition:
        return None

    def with_null(self, condition: Condition) -> Condition:
        return None

    def choose(self, numbers: Tensor) -> Condition:
        return None


@dataclass(frozen=True)
class Classes(ConditionKind):
    """One of `count` classes, entry "class", int64 [B], `count` the null class; names: one per class, or none."""

    name = "class"
    wanted = "a class"

    count: int
    names: tuple[str, ...] = ()

    @property
    def entries(self) -> Entries:
        return {"class": ((), torch.int64)}

    def of(self, batch: Mapping[str, Tensor]) -> Condition:
        return batch["class"]

    def drop(self, condition: Condition, dropped: Tensor) -> Condition:
        return cast(Tensor, condition).masked_fill(dropped, self.count)

    def with_null(self, condition: Condition) -> Condition:
        classes = cast(Tensor, condition)
        return torch.cat((classes, torch.full_like(classes, self.count)))

    @property
    def choices(self) -> int:
        return self.count

    @property
    def choice_names(self) -> tuple[str, ...]:
        return self.names

    def choose(self, numbers: Tensor) -> Condition:
        return numbers

    def problem(self, batch: Mapping[str, Tensor]) -> str | None:
        classes = batch["class"]
        lowest, highest = classes.aminmax()
        if lowest.item() >= 0 and highest.item() < self.count:
            return None
        return f"label {int(classes[(classes < 0) | (classes >= self.count)][0])} is not in 0..{self.count - 1}"


@dataclass(frozen=True, eq=False)
class Embeddings(ConditionKind):
    """Tensors of fixed shape, as the embedded tokens of a text and their mask.

    Attributes:
        nulls: each entry's value for no condition, as of the empty text, of every value's shape and dtype.
        prompts: of each entry the values [P, ...] of the P prompts that grids show; empty: grids show the null condition.
        names: one per prompt, or none.
    """

    name = "embeddings"
    wanted = "embeddings"
    choices_noun = "prompts"

    nulls: dict[str, Tensor]
    prompts: dict[str, Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    _on_devices: dict[str, DeviceTables] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tables = {name: DeviceTables(null) for name, null in self.nulls.items()}
        object.__setattr__(self, "_on_devices", tables)

    @property
    def entries(self) -> Entries:
        return {name: (tuple(null.shape), null.dtype) for name, null in self.nulls.items()}

    def of(self, batch: Mapping[str, Tensor]) -> Condition:
        return _packed({name: batch[name] for name in self.nulls})

    def drop(self, condition: Condition, dropped: Tensor) -> Condition:
        return self._each(
            condition, lambda value, null: torch.where(dropped.view(-1, *[1] * (value.ndim - 1)), null, value)
        )

    def with_null(self, condition: Condition) -> Condition:
        return self._each(condition, lambda value, null: torch.cat((value, null.expand_as(value))))

    def _each(self, condition: Condition, change: Callable[[Tensor, Tensor], Tensor]) -> Condition:
        """Apply (values, null value) -> values to each entry."""
        values = condition if isinstance(condition, dict) else dict.fromkeys(self.nulls, cast(Tensor, condition))
        nulls = {name: self._on_devices[name].on(value.device)[0] for name, value in values.items()}
        return _packed({name: change(value, nulls[name]) for name, value in values.items()})

    @property
    def choices(self) -> int:
        return min((len(values) for values in self.prompts.values()), default=0)

    @property
    def choice_names(self) -> tuple[str, ...]:
        return self.names

    def choose(self, numbers: Tensor) -> Condition:
        if not self.prompts:
            return _packed({name: null.expand(len(numbers), *null.shape) for name, null in self.nulls.items()})
        return _packed({name: self.prompts[name][numbers] for name in self.nulls})


@dataclass(frozen=True, eq=False)
class Texts(Embeddings):
    """Texts encoded when a batch is used; encode: texts -> the entries [B, ...], on any device."""

    wanted = "texts"

    encode: Callable[[Sequence[str]], dict[str, Tensor]] = field(kw_only=True)
    most_bytes: int = field(kw_only=True)

    @property
    def batch_entries(self) -> Entries:
        return {CAPTION: ((self.most_bytes,), torch.uint8)}

    def of(self, batch: Mapping[str, Tensor]) -> Condition:
        letters = batch[CAPTION]
        if letters.is_meta:  # of a network that is only counted
            entries = self.entries.items()
            return {name: torch.empty(len(letters), *shape, dtype=dtype, device="meta") for name, (shape, dtype) in entries}
        texts = texts_of(letters)
        different = list(dict.fromkeys(texts))
        found, place = self.encode(different), {text: number for number, text in enumerate(different)}
        rows = torch.tensor([place[text] for text in texts])
        return {
            name: found[name][rows.to(found[name].device)].to(letters.device, dtype)
            for name, (_, dtype) in self.entries.items()
        }


def placeholder(entries: Entries, count: int, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Batch of `count` images in which nothing but shapes and dtypes counts."""
    return {name: torch.zeros(count, *shape, dtype=dtype, device=device) for name, (shape, dtype) in entries.items()}


def letters_of(texts: Sequence[str], most_bytes: int) -> Tensor:
    """Letters of texts in UTF-8, uint8 [B, most_bytes]; longer ones are cut, and the ends filled with zeros."""
    found = torch.zeros(len(texts), most_bytes, dtype=torch.uint8)
    for row, text in zip(found, texts, strict=True):
        letters = text.encode()[:most_bytes]
        if letters:
            row[: len(letters)] = torch.frombuffer(bytearray(letters), dtype=torch.uint8)
    return found


def texts_of(letters: Tensor) -> list[str]:
    """Inverse of `letters_of`; a letter that was cut in the middle is left out."""
    return [row.numpy().tobytes().rstrip(b"\0").decode(errors="ignore") for row in letters.cpu()]


def is_number(name: str) -> bool:
    """Check whether a name is a number, as of class folders 0, 1, 2."""
    return name.isascii() and name.isdigit() and len(name) <= 18


def numbered_otherwise(names: Sequence[str]) -> dict[str, int]:
    """Names that are another number than their place, with it."""
    return {name: place for place, name in enumerate(names) if is_number(name) and int(name) != place}


def class_kind(num_classes: int, names: Sequence[str] = ()) -> ConditionKind:
    """Kind of data with classes, or without if there are 0."""
    return Classes(num_classes, tuple(names)) if num_classes else Unconditional()


def each_tensor(condition: Condition, change: Callable[[Tensor], Tensor]) -> Condition:
    """Apply a function to every tensor of a condition, as a move to a device or a choice of rows."""
    if isinstance(condition, dict):
        return {name: change(value) for name, value in condition.items()}
    return None if condition is None else change(condition)


def _packed(entries: dict[str, Tensor]) -> Condition:
    if len(entries) > 1:
        return entries
    return next(iter(entries.values()), None)
