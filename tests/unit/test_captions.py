"""Captions of a latent store: encoded by a stand-in, kept beside the images, read as conditions."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.extractions import write_photographs
from torchtitan.conditions import POOLED, TEXT, Classes, Embeddings
from torchtitan.config.job import ConfigError, load_config
from torchtitan.data.base import DatasetError
from torchtitan.data.latents import Latents, LatentsConfig
from torchtitan.errors import LatentStoreError
from torchtitan.extraction.caption_encoding import collect_captions, plan_captions
from torchtitan.latents import LatentStore, verify_shards
from torchtitan.latents.captions import NULL_CAPTION, texts_digest
from torchtitan.latents.index import read_index
from torchtitan.texts import TextEncoderError, open_encoder, open_encoders, reopen_encoders
from torchtitan_dit.commands.extract_latents import main

WIDTH, POOLED_WIDTH, LENGTH = 8, 4, 5
ENCODERS = ["--text-encoder", f"stub:{WIDTH}", "--pooled-encoder", f"stub:{POOLED_WIDTH}", "--text-length", str(LENGTH)]
TEMPLATE = ["--class-captions", "a photo of a {}"]
CLASSES = ["class0", "class1", "class2"]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return write_photographs(tmp_path_factory.mktemp("photographs"), 12, bad=(4,))


@pytest.fixture(scope="module")
def store(photographs, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    assert main(words_of(store, photographs, *ENCODERS, *TEMPLATE)) == 0
    return store


def words_of(store, photographs, *more):
    return [
        "--output", str(store), "--autoencoder", "identity", "--num-workers", "0", "--images-per-shard", "5",
        "--data.name", "image_folder", "--data.path", str(photographs), "--data.image_size", "16",
        "--data.validation_fraction", "0", *more,
    ]  # fmt: skip


def config_of(store: Path, **keys) -> LatentsConfig:
    return LatentsConfig(path=str(store), validation_fraction=0.0, **keys)


class Source:
    """What `collect_captions` asks of a source."""

    name = "data.name = toy"

    def __init__(self, captions=(), names=()):
        self._captions, self.info = list(captions), type("Info", (), {"class_names": list(names)})

    def captions(self):
        return self._captions


def test_stub_is_a_function_of_the_words_alone():
    encoder = open_encoder("stub:64")
    one = encoder.encode(["A red car.", ""], 6)
    other = open_encoder("stub:64").encode(["blue", "a RED  car ."], 6)
    assert torch.equal(one.tokens[0], other.tokens[1]) and torch.equal(one.pooled[0], other.pooled[1])
    assert not one.tokens[1].any() and not one.pooled[1].any() and not one.tokens[0, 4:].any()
    torch.testing.assert_close(one.pooled[0], one.tokens[0].sum(0) / 2)  # of four words
    words = encoder.encode([f"word{number}" for number in range(300)], 1).tokens[:, 0]
    assert abs(float(words.mean())) < 4 / words.numel() ** 0.5
    assert float(words.var()) == pytest.approx(1, abs=4 * (2 / words.numel()) ** 0.5)


def test_texts_are_numbered_once_in_the_images_order():
    captions = collect_captions(Source(["a cat", "a dog", "a cat", ""]), None, "", ["a fish", "a dog", "a fish"])
    assert captions.texts == ["", "a cat", "a dog", "a fish"]
    assert captions.of([3, 2, 1], torch.zeros(3, dtype=torch.int64)).tolist() == [0, 1, 2]
    assert captions.prompts == [3, 2, 3]
    assert collect_captions(Source(map(str, range(30))), None, "", []).prompts == list(range(1, 11))


def test_captions_of_classes_are_their_names_in_the_template():
    captions = collect_captions(Source(names=["cat", "cat", "dog"]), "a {} in {}", "nothing", [])
    assert captions.texts == ["nothing", "a cat in cat", "a cat in cat", "a dog in dog"]
    assert captions.of([7, 8, 9], torch.tensor([2, 0, 1])).tolist() == [3, 1, 2]


def test_other_texts_or_other_captions_of_images_make_another_plan():
    encoders = open_encoders("stub:8", "stub:4", 5)
    digests = [
        plan_captions(collect_captions(Source(captions), None, null, []), encoders, "float32", None, False).digest
        for captions, null in (("ab", ""), ("ba", ""), ("aba", ""), ("abb", ""), ("ab", "-"))
    ]
    assert len({*digests}) == len(digests)
    assert texts_digest(["ab", "c"]) != texts_digest(["a", "bc"])


def test_store_holds_each_images_caption_and_its_embeddings(store):
    index, opened = read_index(store), LatentStore(store)
    assert index.captions is not None and opened.captions is not None
    assert index.captions.source == "class" and index.captions.num_texts == 4
    assert index.captions.encoders == {"text": {"name": "stub", "width": 8}, "pooled": {"name": "stub", "width": 4}}
    assert len(opened) == 11  # one could not be decoded
    labels = opened.read(np.arange(11))[1]
    numbers = opened.caption_numbers(np.arange(11))
    assert numbers.tolist() == (labels + 1).tolist() and labels.tolist() == [0] * 4 + [1] * 3 + [2] * 4
    texts = ["", *(f"a photo of a {name}" for name in CLASSES)]
    assert [opened.captions.text(number) for number in range(4)] == texts
    assert [opened.captions.number_of(text) for text in (*texts, "a cat")] == [0, 1, 2, 3, None]
    read = opened.captions.read([3, 0, 3])
    assert read[TEXT].shape == (3, LENGTH, WIDTH) and read[POOLED].shape == (3, POOLED_WIDTH)
    wanted = open_encoder("stub:8").encode(texts, LENGTH).tokens.bfloat16()
    assert torch.equal(read[TEXT], wanted[[3, 0, 3]])
    assert torch.equal(read[POOLED], open_encoder("stub:4").encode(texts, 77).pooled.bfloat16()[[3, 0, 3]])
    assert not any(verify_shards(store, index))


def test_images_of_a_store_with_captions_are_those_of_one_without(store, photographs, tmp_path):
    assert main(words_of(tmp_path / "plain", photographs)) == 0
    plain, captioned = LatentStore(tmp_path / "plain"), LatentStore(store)
    assert all(map(torch.equal, plain.read(np.arange(11)), captioned.read(np.arange(11))))
    index = json.loads((tmp_path / "plain" / "index.json").read_text())
    assert "captions" not in index and "caption_shards" not in index  # as before there were captions
    assert plain.captions is None


def test_dataset_gives_captions_as_conditions(store):
    info = Latents.info(config_of(store))
    kind = info.condition_kind
    assert isinstance(kind, Embeddings)
    assert kind.entries == {TEXT: ((LENGTH, WIDTH), torch.bfloat16), POOLED: ((POOLED_WIDTH,), torch.bfloat16)}
    assert not kind.nulls[TEXT].any() and kind.names == tuple(f"a photo of a {name}" for name in CLASSES)
    dataset = Latents(config_of(store), "train")
    batch = dataset.fetch(np.array([10, 0]))
    assert batch.keys() == {"images", TEXT, POOLED}
    assert torch.equal(batch[TEXT], kind.prompts[TEXT][[2, 0]]) and torch.equal(batch[POOLED], kind.prompts[POOLED][[2, 0]])
    assert dataset.captions(np.array([10, 0])) == ["a photo of a class2", "a photo of a class0"]


def test_dataset_gives_classes_where_they_are_asked_for(store):
    config = config_of(store, condition="class")
    assert Latents.info(config).condition_kind == Classes(3, tuple(CLASSES))
    assert Latents(config, "train").fetch(np.array([10, 0])).keys() == {"images", "class"}


def test_dit_on_a_store_of_captions_is_told_of_its_classes(store):
    words = ["--data.name", "latents", "--data.path", str(store), "--model.patch_size", "4"]
    with pytest.raises(ConfigError, match="choose flux, or data.condition = class where the store has classes, or other data"):
        load_config(words, 1)
    assert load_config([*words, "--data.condition", "class"], 1).model.name == "dit"


def test_condition_that_a_store_lacks_is_refused(store, photographs, tmp_path):
    assert main(words_of(tmp_path / "plain", photographs, "--data.labels", "false")) == 0
    for condition, message in (("captions", "keeps no captions"), ("class", "keeps no classes")):
        with pytest.raises(DatasetError, match=f"^data.condition: .*plain {message}"):
            Latents.info(config_of(tmp_path / "plain", condition=condition))


def test_held_out_store_with_other_encoders_is_refused(store, photographs, tmp_path):
    assert main(words_of(tmp_path / "held_out", photographs, *ENCODERS, *TEMPLATE, "--text-encoder", "stub:16")) == 0
    with pytest.raises(DatasetError, match="^data.validation_path: .*held_out: its captions.encoders is not that of"):
        Latents.info(config_of(store, validation_path=str(tmp_path / "held_out")))
    main(words_of(tmp_path / "plain", photographs))
    with pytest.raises(DatasetError, match="its captions is not that of"):
        Latents.info(config_of(store, validation_path=str(tmp_path / "plain")))


@pytest.mark.parametrize(
    "more, message",
    [
        ([*ENCODERS, "--text-encoder", "stub:16"], "holds a store with captions.text_shape = [5, 8], this would be [5, 16]"),
        ([*ENCODERS, "--null-caption", "nothing"], "holds a store with captions.digest"),
        ([], "holds a store with captions"),
    ],
)
def test_store_of_other_encoders_lengths_or_texts_is_not_added_to(store, photographs, capsys, more, message):
    before = {path: path.read_bytes() for path in store.iterdir()}
    words = [*words_of(store, photographs), *more, *(TEMPLATE if more else [])]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{store}: {message}" in said
    assert {path: path.read_bytes() for path in store.iterdir()} == before


@pytest.mark.parametrize(
    "words, message",
    [
        (["--text-encoder", "stub:8"], "--text-encoder: needs --pooled-encoder too"),
        ([*ENCODERS, "--class-captions", "a photo"], "--class-captions: 'a photo' has no {} for the name of the class"),
        (ENCODERS, "its images have no captions (--class-captions makes them of classes)"),
        ([*ENCODERS, *TEMPLATE, "--data.labels", "false"], "--class-captions: data.name = image_folder has no names of classes"),
    ],
)
def test_impossible_captions_are_refused_in_one_line_and_nothing_is_written(photographs, tmp_path, capsys, words, message):
    try:
        code = main(words_of(tmp_path / "store", photographs, *words))
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and message in said and said.count("\n") == 1, said
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["captions-00000.safetensors", "captions-00000"])
def test_damaged_captions_are_found(store, photographs, tmp_path, capsys, name):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in store.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    file = copy / "captions-00000.safetensors"
    if name == file.name:  # a changed letter
        content = bytearray(file.read_bytes())
        place = content.index(b"a photo of a class1")
        content[place] ^= 1
        file.write_bytes(content)
        assert main(["verify", str(copy)]) == 1
        assert f"{file}: damaged, its SHA-256 is another" in capsys.readouterr().out
        assert LatentStore(copy).captions.number_of("a photo of a class1") is None
    else:
        file.unlink()
        with pytest.raises(LatentStoreError, match="captions-00000.safetensors: missing"):
            LatentStore(copy)


def test_captions_survive_pickling(store):
    opened = pickle.loads(pickle.dumps(LatentStore(store)))
    assert torch.equal(opened.captions.read([2])[TEXT], LatentStore(store).captions.read([2])[TEXT])
    assert opened.captions.text(NULL_CAPTION) == ""


def test_encoders_are_opened_again_by_their_identities():
    identities = open_encoders("stub:8", "stub:4", LENGTH).identities
    again = reopen_encoders(identities, {}, LENGTH)
    assert again.identities == identities and again.encode(["a cat"])[0][TEXT].shape == (1, LENGTH, 8)
    with pytest.raises(TextEncoderError, match="^--text-encoder: stub:16 is another encoder .*: width is 16, not 8"):
        reopen_encoders(identities, {TEXT: "stub:16"}, LENGTH)
    real = identities | {TEXT: {"name": "t5", "weights_sha256": "ab" * 32, "dtype": "bfloat16", "device": "cuda"}}
    with pytest.raises(TextEncoderError, match="^--text-encoder: give the t5 encoder of abababababab"):
        reopen_encoders(real, {}, LENGTH)
