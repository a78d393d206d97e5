"""Modes of files that a run writes."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from torchtitan.files.durable import replacing
from torchtitan.files.weight_files import written_whole


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_libraries_that_write_for_the_owner_alone_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with replacing(tmp_path / "one") as unfinished:
            save_file({"x": torch.zeros(2)}, unfinished)
        with written_whole(tmp_path / "two.safetensors", overwrite=False) as unfinished:
            save_file({"x": torch.zeros(2)}, unfinished)
        with written_whole(tmp_path / "folder", overwrite=False) as unfinished:
            unfinished.mkdir()
            save_file({"x": torch.zeros(2)}, unfinished / "three.safetensors")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    for name in ("one", "two.safetensors", "folder/three.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
