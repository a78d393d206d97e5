"""Features in a cache: the same bytes on any number of processes, after a kill, and for chunks of other sets."""

import numpy as np
import pytest
import torch

from tests.evaluations import Projection, extracted_on_this_rank, random_images, write_folder
from tests.launcher import run_on_ranks
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.feature_files import ExtractionFailed, FeatureFolder, extract_features, hash_images
from torchtitan.evaluation.image_sets import open_images


def parts(cache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob("projection-*/*.safetensors")}


@pytest.mark.parametrize("ranks", [2, 3])
def test_moments_are_those_of_one_process_bit_for_bit(tmp_path, ranks):
    images = random_images(50)
    folder = write_folder(tmp_path / "images", images)
    alone = extracted_on_this_rank(str(folder), str(tmp_path / "alone"), chunk=8)
    arguments = {"images": str(folder), "cache": str(tmp_path / "shared"), "chunk": 8}
    found = run_on_ranks("tests.evaluations:extracted_on_this_rank", ranks, arguments)
    assert found == [alone] * ranks
    assert parts(tmp_path / "shared") == parts(tmp_path / "alone") and len(parts(tmp_path / "alone")) == 7
    rows = Projection().extract(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))["pooled"].double().numpy()
    np.testing.assert_allclose(alone[1], rows.mean(0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(alone[2], np.cov(rows, rowvar=False), rtol=1e-5, atol=1e-4)


def test_only_missing_chunks_are_computed_and_equal_ones_are_shared(tmp_path):
    folder, cache = write_folder(tmp_path / "images", random_images(50)), tmp_path / "cache"
    whole = extracted_on_this_rank(str(folder), str(cache), chunk=8)
    before = parts(cache)
    times = {path.name: path.stat().st_mtime_ns for path in cache.glob("*/*.safetensors")}
    lost = sorted(times)[:3]
    for name in lost:
        next(cache.glob(f"*/{name}")).unlink()
    next(cache.iterdir()).joinpath(f".{lost[0]}.{'0' * 32}.unfinished").write_bytes(b"what a kill leaves")
    assert extracted_on_this_rank(str(folder), str(cache), chunk=8) == whole and parts(cache) == before
    after = {path.name: path.stat().st_mtime_ns for path in cache.glob("*/*.safetensors")}
    assert {name for name in times if after[name] != times[name]} == set(lost)
    (folder / "000049.png").unlink()
    extracted_on_this_rank(str(folder), str(cache), chunk=8)
    assert len(parts(cache).keys() - before.keys()) == 1  # the last chunk
    assert not list(cache.glob("*/.*.unfinished"))


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_features_of_images_that_were_changed_after_they_were_hashed_are_not_kept(tmp_path, kind):
    before, after = random_images(20), random_images(20, seed=1)
    place = tmp_path / ("images" if kind == "folder" else "images.npz")

    def write(images: np.ndarray) -> None:
        write_folder(place, images) if kind == "folder" else np.savez(place, arr_0=images)

    write(before)
    hashed = hash_images(open_images(place), chunk=8)
    write(after)
    folder = FeatureFolder(tmp_path / "cache", Projection())
    with folder.opened(), pytest.raises(ExtractionFailed, match="images were changed while they were read"):
        extract_features(hashed, ["pooled"], folder, 4)
    assert not parts(tmp_path / "cache")
    with folder.opened():
        extract_features(hash_images(open_images(place), chunk=8), ["pooled"], folder, 4)
    assert len(parts(tmp_path / "cache")) == 3


def test_foreign_folders_and_damaged_parts_are_refused(tmp_path):
    images = open_images(write_folder(tmp_path / "images", random_images(9)))
    folder = FeatureFolder(tmp_path / "cache", Projection())
    folder.path.mkdir(parents=True)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(EvaluationError, match="holds notes.txt, which is not a cache of features'"), folder.opened():
        pass
    (folder.path / "notes.txt").unlink()
    hashed = hash_images(images, chunk=8)
    with folder.opened():
        for content in (b"no file", b""):
            folder.part(hashed.digests[0], "pooled").write_bytes(content)
            with pytest.raises(EvaluationError, match="cannot be read: .*remove it"):
                list(folder.rows(hashed, "pooled"))
