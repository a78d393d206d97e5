"""Files of torch.save that would take more memory or time than they have bytes are refused before torch reads them."""

import zipfile

import pytest
import torch

from tests.faults.confinement import bounded
from torchtitan.files.weight_files import WeightsError, read_state_dict


def saved(path):
    tensors = {f"layers.{k}.weight": torch.full((3, 4), float(k)) for k in range(5)}
    tensors["tied"] = tensors["layers.0.weight"]
    torch.save({"ema": tensors, "epoch": 3}, path)
    return tensors


def rewritten(path, change) -> None:
    """Give each member of an archive the content and compression that `change` returns."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, *change(name, content))


@pytest.mark.parametrize("archive", [True, False])
def test_what_torch_saves_is_read(tmp_path, archive):
    tensors = saved(tmp_path / "a.pt")
    if not archive:
        torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    found, nested = read_state_dict(tmp_path / "a.pt")
    assert nested == ("ema" if archive else None) and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_an_archive_that_unpacks_to_more_than_its_size_is_refused(tmp_path):
    saved(tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", lambda name, content: (
        (b"\0" * (256 << 20), zipfile.ZIP_DEFLATED) if name.endswith("data/0") else (content, zipfile.ZIP_STORED)
    ))  # fmt: skip
    assert (tmp_path / "a.pt").stat().st_size < 1 << 20
    with bounded(10, 128 << 20), pytest.raises(WeightsError, match="a packed archive, which torch.save does not write"):
        read_state_dict(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00(K\x01"])
def test_a_list_of_tensors_cut_off_is_refused(tmp_path, content):
    saved(tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", lambda name, old: (content if name.endswith("data.pkl") else old, zipfile.ZIP_STORED))
    with pytest.raises(WeightsError, match=r"a\.pt: "):
        read_state_dict(tmp_path / "a.pt")
