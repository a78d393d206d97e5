"""Images to compare and references, from every kind of file; each that cannot serve is refused in one line."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluations import Projection, extracted_on_this_rank, frechet_distance, random_images, write_folder
from tests.launcher import run_on_ranks
from tests.refusals import one_line
from torchtitan.errors import EvaluationError
from torchtitan.fidelity.extraction import extract_images
from torchtitan.fidelity.images import open_images, read_ahead
from torchtitan.fidelity.measuring import Request, check_request, features_of_samples, measure, reference_features
from torchtitan.fidelity.moments import moments_of_rows
from torchtitan.fidelity.references import open_reference, write_reference

INCEPTION = Projection(name="inception")


def refused(function, *arguments) -> str:
    return one_line(EvaluationError, function, *arguments)


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
    assert len(first) == 7 and np.array_equal(first.pixels(range(5, 7)), images[5:7])
    assert "--count: 24, but" in refused(source.first, 24)


def test_features_on_ranks_are_those_of_one_process_bit_for_bit(tmp_path):
    """Of 50 images in batches of 8: some ranks have one batch more, and the last is of two images."""
    images = random_images(50)
    arguments = {"images": str(write_folder(tmp_path / "images", images)), "batch_size": 8}
    alone = extracted_on_this_rank(**arguments)
    assert run_on_ranks("tests.evaluations:extracted_on_this_rank", 3, arguments) == [alone, {}, {}]
    rows = Projection().extract(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))["pooled"]
    np.testing.assert_allclose(alone["projection pooled"], rows, rtol=1e-5, atol=1e-5)
    assert np.shape(alone["other pooled"]) == (50, 3) and np.shape(alone["projection logits"]) == (50, 4)


def test_an_image_that_one_rank_cannot_read_is_an_error_of_all(tmp_path):
    arguments = {"images": str(write_folder(tmp_path / "images", random_images(50))), "batch_size": 8, "damaged": 41}
    found = run_on_ranks("tests.evaluations:extracted_on_this_rank", 2, arguments)
    assert len(set(found)) == 1 and "000041.png: cannot be read" in found[0]


def test_images_that_cannot_be_compared_are_refused_in_one_line(tmp_path):
    mixed = write_folder(tmp_path / "mixed", random_images(40))  # of which the second is not looked at when it is opened
    write_folder(tmp_path / "large", random_images(1, size=9))
    (tmp_path / "large" / "000000.png").rename(mixed / "000001.png")
    message = refused(open_images(mixed).pixels, range(3))
    assert "mixed/000001.png: 9 x 9 pixels, and " in message
    assert f"evaluate.py reference image_folder --name NAME --data.path {mixed} --data.image_size N)" in message
    (mixed / "000001.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    assert "000001.png: cannot be read: " in refused(open_images(mixed).pixels, range(3))
    (tmp_path / "empty").mkdir()
    assert "holds no images" in refused(open_images, tmp_path / "empty")
    assert "no such folder of images" in refused(open_images, tmp_path / "none")
    unit = write_folder(tmp_path / "unit", random_images(3) // 128)
    assert "no pixel is above 1" in refused(open_images, unit)
    (unit / "set.json").write_text(json.dumps({"sample_set": 1, "images": 4}))
    assert "holds 3 of 4 images of its set" in refused(open_images, unit)


def test_npz_files_that_are_no_images_are_refused_in_one_line(tmp_path):
    path = tmp_path / "batch.npz"
    for arrays, said in (
        ({"arr_0": random_images(2) / 255}, "arr_0 is float64, images are uint8 in 0..255"),
        ({"arr_0": random_images(2).transpose(0, 3, 1, 2)}, "not images [N, H, W, 3]"),
        ({"arr_0": np.array([{"a": 1}], object)}, "arr_0 is a pickle, which is not read"),
        ({"mu": np.zeros(6), "sigma": np.eye(6)}, "holds mu, sigma, and no images arr_0"),
    ):
        np.savez(path, **arrays)
        assert said in refused(open_images, path)
    np.savez(path, arr_0=random_images(9))
    path.write_bytes(path.read_bytes()[:900])
    assert "is no readable npz file" in refused(open_images, path)


def test_classes_of_samples_are_those_of_the_set_or_of_the_file(tmp_path):
    images, classes = random_images(5), np.array([3, 1, 4, 1, 5])
    np.savez(tmp_path / "batch.npz", arr_0=images, arr_1=classes)
    assert open_images(tmp_path / "batch.npz").first(4).classes().tolist() == [3, 1, 4, 1]
    folder = write_folder(tmp_path / "set", images)
    assert open_images(folder).classes() is None
    (folder / "set.json").write_text(json.dumps({"sample_set": 1, "images": 5, "num_steps": 9}))
    order = [4, 2, 0, 1, 3]  # as of --seeds 4,2,0,1,3
    (folder / "labels.csv").write_text("file,class\n" + "".join(f"{number:06d}.png,{classes[number]}\n" for number in order))
    found = open_images(folder)
    assert found.classes().tolist() == classes.tolist() and found.record()["set"] == {"num_steps": 9}
    (folder / "labels.csv").write_text("file,class\n000000.png,3\n")
    assert "does not have the class of every image" in refused(found.classes)


def test_statistics_and_images_of_npz_references_are_distinguished(tmp_path):
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
        moments = found[name].moments("inception", "pooled")
        assert np.array_equal(moments.mean, mean) and np.array_equal(moments.covariance, covariance)
        assert found[name].count is None and moments.count is None
    assert found["adm"].holds("inception", "spatial", "moments") and not found["adm"].holds("inception", "pooled", "rows")
    assert not found["adm"].holds("projection", "pooled", "moments")  # of another network: from the images
    assert found["images"].count == 5 and found["images"].size == (8, 8) and found["statistics"].size is None
    said = refused(found["statistics"].check, "inception", "pooled", "rows", "kid")
    assert said.startswith("kid: needs rows of inception's pooled features, and ") and "holds statistics of inception's" in said
    for name in ("adm", "images"):
        found[name].check("projection", "pooled", "rows", "kid")
    for arrays, said in (
        ({"mu": mean, "sigma": np.eye(5)}, "are no mean [D] and covariance [D, D]"),
        ({"x": mean}, "holds x; a reference has"),
    ):
        np.savez(tmp_path / "other.npz", **arrays)
        assert said in refused(open_reference, str(tmp_path / "other.npz"))
    np.savez(tmp_path / "half.npz", mu=mean, sigma=np.triu(np.ones((6, 6))))
    half = open_reference(str(tmp_path / "half.npz"))
    assert "sigma is no covariance: it is not symmetric" in refused(half.moments, "inception", "pooled")
    assert "neither a path nor the name of a reference" in refused(open_reference, "nowhere")


def test_a_made_reference_goes_before_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "classes", random_images(4, size=8))
    place = tmp_path / "outputs" / "references"
    place.mkdir(parents=True)
    np.savez(place / "classes.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    assert open_reference("classes").place == str(Path("outputs", "references", "classes.npz"))
    assert open_reference("./classes").place == "classes"


class Harmful:
    def __reduce__(self):
        return print, ("harm",)


def test_statistics_of_edm2_are_read_and_no_code_in_their_file_runs(tmp_path, capsys):
    path, rows = tmp_path / "img512.pkl", np.random.default_rng(0).standard_normal((9, 3))
    statistics = {"mu": rows.mean(0), "sigma": np.cov(rows, rowvar=False)}
    path.write_bytes(pickle.dumps({"fid": statistics, "fd_dinov2": {"mu": np.ones(2), "sigma": np.eye(2)}, "num_images": 9}))
    found = open_reference(str(path))
    assert np.array_equal(found.moments("inception", "pooled").covariance, statistics["sigma"])
    assert np.array_equal(found.moments("dinov2", "pooled").mean, np.ones(2)) and not found.holds("dinov2", "pooled", "rows")
    path.write_bytes(pickle.dumps({"fid": Harmful()}))
    assert "it names builtins.print, which numbers and arrays do not need" in refused(open_reference, str(path))
    path.write_bytes(b"no pickle")
    assert "is no file of EDM2's statistics" in refused(open_reference, str(path)) and not capsys.readouterr().out


def test_a_made_reference_keeps_statistics_and_rows_of_each_extractor(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.fidelity.references.MOST_ROWS", 20)
    source, path = open_images(write_folder(tmp_path / "images", random_images(23))), tmp_path / "made.npz"
    extractors = {"inception": INCEPTION, "other": Projection(dim=3, name="other")}
    rows = extract_images(source, extractors, {key: ["pooled"] for key in extractors})
    write_reference(path, "made", source, extractors, rows, {})
    reference = open_reference(str(path))
    assert (reference.name, reference.count, reference.size) == ("made", 23, (8, 8))
    assert reference.record()["images"]["kind"] == "folder"
    for name in extractors:
        kept = reference.rows(name, "pooled")
        assert len(kept) == 20 and {tuple(row) for row in kept} < {tuple(row) for row in rows[name, "pooled"]}
        assert not reference.holds_all_rows(name, "pooled")
        moments, wanted = reference.moments(name, "pooled"), rows[name, "pooled"].astype(np.float64)
        np.testing.assert_allclose(moments.covariance, np.cov(wanted, rowvar=False), rtol=0, atol=1e-12)
        assert moments.count == 23
    with np.load(path) as file:  # other programs find the names that they know
        assert file["mu"].shape == (6,) and file["sigma"].shape == (6, 6)
    said = refused(reference.check, "inception", "spatial", "moments", "sfid")
    assert "needs moments of inception's spatial features" in said and "20 rows of other's pooled" in said


def test_what_cannot_be_measured_is_refused_before_any_work(tmp_path):
    reference = open_reference(str(write_folder(tmp_path / "reference", random_images(30, size=9))))
    extractors = {"projection": Projection()}

    def refusal(metrics, count=50, size=(9, 9), given=reference, held_out=None, **options) -> str:
        return refused(check_request, Request(metrics, "projection", **options), extractors, count, size, given, held_out)

    check_request(Request(("fd", "is"), "projection"), extractors, 20, (9, 9), reference, None)
    assert "is: 19 samples are too few (take at least 20" in refusal(("is",), 19)
    few = open_reference(str(write_folder(tmp_path / "few", random_images(12, size=9))))
    assert "12 held-out images are too few (take at least 100" in refusal(("memorisation",), held_out=few)
    assert "kid: 999 images (samples) are too few (take at least 1000, or" in refusal(("kid",), 999)
    assert f"kid: 30 images ({reference.place}) are too few" in refusal(("kid",), 1000)
    assert "fd: a covariance of 6 features from 6 images (samples) has rank 5 at most" in refusal(("fd",), 6)
    check_request(Request(("fd",), "projection", allow_small=True), extractors, 6, (9, 9), reference, None)
    assert "3 samples are too few for any metric" in refusal(("fd",), 3, allow_small=True)
    assert "images of 9 x 9 pixels, and the samples have 8 x 8" in refusal(("fd",), size=(8, 8))
    assert "--reference: not given, and needed by fd, kid" in refusal(("fd", "kid", "is"), given=None)
    assert "--held-out: not given" in refusal(("memorisation",))
    assert "sfid: reads spatial, and inception gives pooled, logits" in refused(
        check_request, Request(("sfid",)), {"inception": INCEPTION}, 50, (9, 9), reference, None
    )


def test_fid_is_of_the_statistics_of_a_batch_and_precision_of_its_images(tmp_path):
    """The statistics of ADM's batches are of more images than the batch has."""
    training, samples = random_images(90, seed=3), random_images(50)
    rows = {
        name: INCEPTION.extract(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))["pooled"].double().numpy()
        for name, pixels in (("training", training), ("samples", samples))
    }
    statistics = moments_of_rows(rows["training"])
    np.savez(tmp_path / "batch.npz", arr_0=training[:40], mu=statistics.mean, sigma=statistics.covariance)
    np.savez(tmp_path / "samples.npz", arr_0=samples)
    request, extractors = Request(("fid", "prdc", "fd")), {"inception": INCEPTION}
    reference = open_reference(str(tmp_path / "batch.npz"))
    check_request(request, extractors, 50, (8, 8), reference, None)
    extracted = extract_images(open_images(tmp_path / "samples.npz"), extractors, request.outputs())
    compared = reference_features(request, extractors, reference)
    found = measure(request, features_of_samples(extracted), compared, {})
    expected = frechet_distance(moments_of_rows(rows["samples"]), statistics)
    assert found["fid"].values["fid"].value == pytest.approx(expected, rel=1e-5)
    assert found["fd"].values["fd"].value == found["fid"].values["fid"].value
    assert any("50 samples and 40 reference images" in note for note in found["prdc"].notes)
