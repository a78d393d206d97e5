"""Files of torch.save are read without running anything in them, and damaged ones are refused by name."""

import os
import zipfile

import pytest
import torch

from torchtitan.files.weight_files import NotTensors, WeightsError, read_state_dict


def saved(path):
    tensors = {f"layers.{k}.weight": torch.full((3, 4), float(k)) for k in range(5)}
    tensors["tied"] = tensors["layers.0.weight"]
    torch.save({"ema": tensors, "epoch": 3}, path)
    return tensors


@pytest.mark.parametrize("archive", [True, False])
def test_what_torch_saves_is_read(tmp_path, archive):
    tensors = saved(tmp_path / "a.pt")
    if not archive:
        torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    found, nested = read_state_dict(tmp_path / "a.pt")
    assert nested == ("ema" if archive else None) and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_file_that_names_functions_is_refused_and_none_is_called(tmp_path):
    class Command:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"a": torch.ones(2), "b": Command()}, tmp_path / "a.pt")
    with pytest.raises(NotTensors, match=r"a\.pt: holds more than tensors"):
        read_state_dict(tmp_path / "a.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"t.", b"h\x05.", b"0.", b"\x80\x02}q\x00(K\x01"])
def test_a_list_of_tensors_cut_off_is_refused(tmp_path, content):
    saved(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, old in members.items():
            archive.writestr(name, content if name.endswith("data.pkl") else old)
    with pytest.raises(WeightsError, match=r"a\.pt: "):
        read_state_dict(tmp_path / "a.pt")
