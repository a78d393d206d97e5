"""Images to be judged and references, from every kind of file; each that cannot serve is refused in one line."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch

from tests.evaluations import Projection, random_images, write_folder
from torchtitan.errors import EvaluationError
from torchtitan.evaluation.evaluation_file import spread
from torchtitan.evaluation.evaluation_table import result_lines
from torchtitan.evaluation.feature_files import FeatureFolder, extract_features, hash_images
from torchtitan.evaluation.image_sets import open_images, read_ahead
from torchtitan.evaluation.measuring import Compared, Request, Result, check_request, hash_compared, measure
from torchtitan.evaluation.references import (
    KeptOutput,
    add_features,
    begin_reference,
    kept_numbers,
    open_reference,
)
from torchtitan.evaluation.sample_plans import SetPlan
from torchtitan.evaluation.sample_sets import SampleSet
from torchtitan.fidelity.frechet import frechet_distance
from torchtitan.fidelity.measurement import Measurement
from torchtitan.fidelity.moments import moments_of_rows
from torchtitan.statistics.interval import Interval

INCEPTION = Projection(name="inception")


def refused(function, *arguments) -> str:
    with pytest.raises(EvaluationError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "npz", "compressed"])
def test_images_are_read_in_parts_from_any_source(tmp_path, kind):
    images = random_images(23)
    path = tmp_path / "images.npz"
    if kind == "folder":
        path = write_folder(tmp_path / "images", images)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(path, arr_0=images)
    source = open_images(path)
    assert len(source) == 23 and source.size == (8, 8)
    parts = [range(start, min(start + 4, 23)) for start in range(0, 23, 4)]
    assert np.array_equal(np.concatenate(list(read_ahead(source, parts))), images)
    assert np.array_equal(source.pixels(range(2, 5)), images[2:5])  # backwards too
    first = source.first(7)
    assert len(first) == 7 and first.record()["of"] == 23
    assert "--count: 24, but" in refused(source.first, 24)
    hashed, other = hash_images(source, chunk=5), hash_images(first, chunk=5)
    assert hashed.digests[0] == other.digests[0] and hashed.digests[1] != other.digests[1]


def test_equal_bytes_in_another_shape_are_other_images(tmp_path):
    images = random_images(6)
    for name, shape in (("wide", (6, 4, 16, 3)), ("high", (6, 16, 4, 3))):
        np.savez(tmp_path / name, arr_0=images.reshape(shape))
    wide, high = (hash_images(open_images(tmp_path / f"{name}.npz")) for name in ("wide", "high"))
    assert wide.sha256 != high.sha256


@pytest.mark.parametrize("file_format", ["png", "npz", "parquet"])
def test_a_set_of_samples_is_read_with_its_record(tmp_path, file_format):
    images = random_images(13)
    plan = SetPlan(torch.arange(13), torch.arange(13) % 3, 4, {"image_shape": [3, 8, 8], "num_steps": 5})
    samples = SampleSet(tmp_path / "set", plan, file_format)
    for batch in samples.begin():
        pixels = torch.from_numpy(images[batch * 4 : batch * 4 + 4]).permute(0, 3, 1, 2)
        samples.write(batch, pixels / 127.5 - 1)
    samples.finish()
    source = open_images(tmp_path / "set")
    assert np.array_equal(np.concatenate(list(read_ahead(source, [range(5), range(5, 13)]))), images)
    assert len(hash_images(source, chunk=5).digests) == 3
    record = source.record()
    assert record["kind"] == "set" and record["set"]["seeds"] == "0-12" and record["set"]["num_steps"] == 5


def test_images_that_cannot_be_compared_are_refused_in_one_line(tmp_path):
    mixed = write_folder(tmp_path / "mixed", random_images(40))  # of which the second is not looked at when it is opened
    write_folder(tmp_path / "large", random_images(1, size=9))
    (tmp_path / "large" / "000000.png").rename(mixed / "000001.png")
    assert "mixed/000001.png: 9 x 9 pixels, and " in refused(hash_images, open_images(mixed))
    (mixed / "000001.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    assert "000001.png: cannot be read: " in refused(hash_images, open_images(mixed))
    (tmp_path / "empty").mkdir()
    assert "holds no images" in refused(open_images, tmp_path / "empty")
    assert "no such folder of images" in refused(open_images, tmp_path / "none")
    unit = write_folder(tmp_path / "unit", random_images(3) // 128)
    assert "no pixel is above 1" in refused(open_images, unit)
    (unit / "set.json").write_text(json.dumps({"sample_set": 1, "format": "png", "images": 4}))
    assert "holds 3 of 4 images of its set" in refused(open_images, unit)
    (unit / "set.json").write_text(json.dumps({"sample_set": 1, "format": "npz", "images": 3}))
    assert "its images are not all drawn" in refused(open_images, unit)


def test_npz_files_that_are_no_images_are_refused_in_one_line(tmp_path):
    path = tmp_path / "batch.npz"
    for arrays, said in (
        ({"arr_0": random_images(2) / 255}, "arr_0 is float64, images are uint8 in 0..255"),
        ({"arr_0": random_images(2).transpose(0, 3, 1, 2)}, "not images [N, H, W, 3]"),
        ({"arr_0": np.array([{"a": 1}], object)}, "arr_0 is a pickle, which is not read"),
        ({"mu": np.zeros(6), "sigma": np.eye(6)}, "holds mu, sigma, and no images arr_0"),
        ({"arr_0": random_images(0)}, "holds no images"),
        ({"arr_0": random_images(2)[:, :0]}, "arr_0 is [2, 0, 8, 3], not images"),
    ):
        np.savez(path, **arrays)
        assert said in refused(open_images, path)
    np.savez(path, arr_0=random_images(9))
    path.write_bytes(path.read_bytes()[:900])
    assert "is no readable npz file" in refused(open_images, path)
    np.save(content := io.BytesIO(), random_images(9))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("arr_0.npy", content.getvalue().replace(b"(9, 8, 8, 3)", b"(-9,-8,8, 3)"))
    assert "arr_0 is damaged: its header does not describe it" in refused(open_images, path)


def test_statistics_and_images_of_npz_references_are_told_apart(tmp_path):
    images, mean, covariance = random_images(5), np.arange(6.0), np.eye(6)
    files = {
        "statistics": {"mu": mean, "sigma": covariance},
        "adm": {"arr_0": images, "mu": mean, "sigma": covariance, "mu_s": np.ones(4), "sigma_s": np.eye(4)},
        "images": {"arr_0": images},
    }
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    found = {name: open_reference(str(tmp_path / f"{name}.npz")) for name in files}
    for name in ("statistics", "adm"):
        assert np.array_equal(found[name].moments(INCEPTION, "pooled").mean, mean)
        assert np.array_equal(found[name].moments(INCEPTION, "pooled").covariance, covariance)
        assert found[name].count is None and found[name].moments(INCEPTION, "pooled").count is None
    assert found["adm"].stored(INCEPTION, "spatial", "moments") and not found["adm"].stored(INCEPTION, "pooled", "rows")
    assert not found["adm"].stored(Projection(), "pooled", "moments")  # of another network: from the images
    assert found["images"].count == 5 and found["images"].size == (8, 8) and found["statistics"].size is None
    said = refused(found["statistics"].check, INCEPTION, "pooled", "rows", "kid")
    assert said.startswith("kid: needs rows of inception's pooled features, and ") and "holds mu and sigma of" in said
    assert "of projection's pooled" in refused(found["statistics"].check, Projection(), "pooled", "moments", "fd")
    for name in ("adm", "images"):
        found[name].check(Projection(), "pooled", "rows", "kid")
    wide = Projection(dim=7, name="inception")
    assert "statistics of 6 features, inception has 7" in refused(found["statistics"].moments, wide, "pooled")
    np.savez(tmp_path / "damaged.npz", mu=mean, sigma=np.eye(5))
    assert "are no mean [D] and covariance [D, D]" in refused(open_reference, str(tmp_path / "damaged.npz"))
    np.savez(tmp_path / "damaged.npz", mu=np.array(["a"] * 6), sigma=np.eye(6))
    assert "are no mean [D] and covariance [D, D]" in refused(open_reference, str(tmp_path / "damaged.npz"))
    np.savez(tmp_path / "half.npz", mu=mean, sigma=np.triu(np.ones((6, 6))))
    half = open_reference(str(tmp_path / "half.npz"))
    assert "sigma is no covariance: it is not symmetric" in refused(half.moments, INCEPTION, "pooled")
    np.savez(tmp_path / "else.npz", x=mean)
    assert "holds x; a reference has" in refused(open_reference, str(tmp_path / "else.npz"))
    assert "neither a path nor the name of a reference" in refused(open_reference, "nowhere")


def made_reference(folder, images, extractor, rows, name="made"):
    hashed = hash_images(images, chunk=5)
    features = FeatureFolder(folder / "features", extractor)
    begin_reference(folder, name, hashed, {})
    with features.opened():
        extract_features(hashed, ["pooled"], features)
        add_features(folder, hashed, features, [KeptOutput("pooled", rows)])
    features.remove()
    return hashed


def test_a_made_reference_keeps_moments_and_rows_of_each_extractor(tmp_path):
    images = random_images(23)
    source, folder = open_images(write_folder(tmp_path / "images", images)), tmp_path / "made"
    hashed = made_reference(folder, source, Projection(), 100)
    made_reference(folder, source, Projection(dim=3, name="other"), 9)
    assert not (folder / "features").exists()
    reference = open_reference(str(folder))
    rows = reference.rows(Projection(), "pooled")
    assert rows.shape == (23, 6) and reference.count == 23 and reference.size == (8, 8)
    moments = reference.moments(Projection(), "pooled")
    np.testing.assert_allclose(moments.mean, rows.mean(0, dtype=np.float64), rtol=0, atol=1e-13)
    np.testing.assert_allclose(moments.covariance, np.cov(rows.astype(np.float64), rowvar=False), rtol=0, atol=1e-12)
    other = Projection(dim=3, name="other")
    assert reference.rows(other, "pooled").shape == (9, 3) and not reference.keeps_all_rows(other, "pooled")
    assert len(set(kept_numbers(23, 9, hashed.sha256).tolist())) == 9
    said = refused(reference.check, INCEPTION, "spatial", "moments", "sfid")
    assert "needs moments of inception's spatial features" in said and "9 rows of other's pooled" in said
    images[4] += 1
    other_images = open_images(write_folder(tmp_path / "changed", images))
    assert "is reference 'made' of 23 other images" in refused(made_reference, folder, other_images, Projection(), 9)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "holds notes.txt" in refused(made_reference, tmp_path / "mine", source, Projection(), 9)
    file = next(folder.glob("projection-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert "is not the file that reference.json describes" in refused(reference.rows, Projection(), "pooled")
    record = json.loads((folder / "reference.json").read_text())
    next(iter(record["features"].values()))["outputs"]["pooled"]["file"] = 3
    (folder / "reference.json").write_text(json.dumps(record, indent=1))
    assert "reference.json: is damaged (make it anew)" in refused(open_reference, str(folder))


def test_what_cannot_be_measured_is_refused_before_any_work(tmp_path):
    reference = open_reference(str(write_folder(tmp_path / "reference", random_images(30, size=9))))
    extractors = {"projection": Projection()}

    def refusal(metrics, count=50, size=(9, 9), given=reference, held_out=None, **options) -> str:
        return refused(check_request, Request(metrics, "projection", **options), extractors, count, size, given, held_out)

    check_request(Request(("fd", "is"), "projection"), extractors, 7, (9, 9), reference, None)
    assert "kid: 999 samples of a set are too few (take at least 1000, or" in refusal(("kid",), 1999, sets=2)
    assert "fd: a covariance of 6 features from 6 images (samples) has rank 5 at most" in refusal(("fd",), 6)
    check_request(Request(("fd",), "projection", allow_small=True), extractors, 6, (9, 9), reference, None)
    assert "from 6 images (each of 10 parts of the samples)" in refusal(("fd_inf",), 65)
    assert "from 6 images" in refusal(("fd",), 13, sets=2)
    assert "--sets: 4 disjoint sets" in refusal(("is",), 7, sets=4)
    assert "3 samples are too few for any metric" in refusal(("fd",), 3, allow_small=True)
    assert "images of 9 x 9 pixels, and the samples have 8 x 8" in refusal(("fd",), size=(8, 8))
    assert "--reference: not given, and needed by fd, kid" in refusal(("fd", "kid", "is"), given=None)
    assert "--held-out: not given" in refusal(("memorisation",))


def test_features_that_are_not_finite_are_refused_with_the_image(tmp_path):
    images = open_images(write_folder(tmp_path / "images", random_images(20)))
    folder = FeatureFolder(tmp_path / "cache", Projection(damaged=7))
    with folder.opened():
        said = refused(extract_features, hash_images(images, chunk=5), ["pooled"], folder)
    assert "gives image 7 pooled features that are not finite" in said
    assert len(list(folder.path.glob("*.safetensors"))) == 1  # the first chunk is kept


def test_disjoint_sets_hold_every_image_once(tmp_path):
    images = open_images(write_folder(tmp_path / "images", random_images(64)))
    reference = open_reference(str(write_folder(tmp_path / "reference", random_images(40, seed=1))))
    request, extractors = Request(("fd", "memorisation"), "projection", sets=2), {"projection": Projection()}
    held_out = open_reference(str(write_folder(tmp_path / "held-out", random_images(100, seed=2))))
    compared = Compared(images, reference, held_out)
    hash_compared(request, extractors, compared, None, chunk=9)
    distance, memorised = measure(request, extractors, compared, tmp_path / "cache")
    assert len(distance.sets) == len(memorised.sets) == 2 and distance.set_images == 32
    shares = [each.values["memorised"].value for each in memorised.sets]
    assert sum(shares) / 2 == pytest.approx(memorised.measurement.values["memorised"].value)
    rows = {name: Projection().extract(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))["pooled"].numpy()
            for name, pixels in (("samples", random_images(64)), ("reference", random_images(40, seed=1)))}
    expected = frechet_distance(moments_of_rows(rows["samples"]), moments_of_rows(rows["reference"]))
    assert distance.measurement.values["fd"].value == pytest.approx(expected, rel=1e-5)
    assert min(each.values["fd"].value for each in distance.sets) > expected  # fewer images, a larger distance


def test_fid_is_of_the_statistics_of_a_batch_and_precision_of_its_images(tmp_path):
    """The statistics of ADM's batches are of more images than the batch has."""
    training, samples = random_images(90, seed=3), random_images(50)
    rows = {
        name: INCEPTION.extract(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))["pooled"].double().numpy()
        for name, pixels in (("training", training), ("samples", samples))
    }
    statistics = moments_of_rows(rows["training"])
    batch = {"arr_0": training[:40], "mu": statistics.mean, "sigma": statistics.covariance}
    np.savez(tmp_path / "batch.npz", **batch)
    np.savez(tmp_path / "samples.npz", arr_0=samples)
    request = Request(("fid", "prdc", "fd"))
    compared = Compared(open_images(tmp_path / "samples.npz"), open_reference(str(tmp_path / "batch.npz")))
    check_request(request, {"inception": INCEPTION}, 50, (8, 8), compared.reference, None)
    hash_compared(request, {"inception": INCEPTION}, compared, None)
    fid, prdc, fd = measure(request, {"inception": INCEPTION}, compared, tmp_path / "cache")
    expected = frechet_distance(moments_of_rows(rows["samples"]), statistics)
    assert fid.measurement.values["fid"].value == pytest.approx(expected, rel=1e-5)
    assert fd.measurement.values["fd"].value == fid.measurement.values["fid"].value
    assert any("50 samples and 40 reference images" in note for note in prdc.measurement.notes)


def test_a_value_that_disjoint_sets_are_too_small_for_has_no_mean(tmp_path):
    images = open_images(write_folder(tmp_path / "images", random_images(8)))
    sets = tuple(Measurement({"kid": Interval(value)}) for value in (1.0, 3.0))
    result = Result("kid", {}, Measurement({"kid": Interval(1.5), "kid_subsets_mean": Interval(1.4)}), sets, 600)
    assert {name: mean.value for name, mean in spread(result).items()} == {"kid": 2.0}
    lines = list(result_lines(Request(("kid",), "projection", sets=2), Compared(images), [result]))
    assert sum("mean of sets" in line for line in lines) == 1
