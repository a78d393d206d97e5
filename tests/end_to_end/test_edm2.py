"""A U-Net of EDM2 as a user has it: trained with classes, resumed, sampled with guidance, its weights out and in."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.cases import make_trainer, stop_after
from tests.end_to_end.runs import checkpoint_tensors
from tests.end_to_end.tools import caller, load_tool

MODEL = (
    "--model.name=edm2", "--model.flavor=XXS", "--model.channels=16", "--model.channel_mults=[1,2]",
    "--model.num_blocks=1", "--model.attention_resolutions=[4]", "--model.channels_per_head=8", "--model.dropout=0.1",
    "--model.label_dropout=0.2", "--objective.path=edm", "--objective.prediction=edm", "--objective.preconditioning=edm",
    "--objective.weighting.name=edm", "--objective.timesteps.name=lognormal_sigma", "--objective.learned_uncertainty=true",
)  # fmt: skip
RUN = (
    *MODEL, "--checkpoint.enable=true", "--checkpoint.interval=3", "--sampling.enable=true", "--sampling.interval=6",
    "--sampling.num_steps=3", "--sampling.guidance_scale=2", "--sampling.images_per_class=1",
    "--sampling.solver.name=edm_heun", "--sampling.schedule.name=edm",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a run without interruption, and one that was resumed."""
    folder = tmp_path_factory.mktemp("edm2")
    arguments = dict(steps=6, replicas=1, shards=1, accumulation=1, overrides=RUN)
    straight = make_trainer(str(folder), "straight", **arguments)
    assert straight.train() == 0
    straight.close()
    first = make_trainer(str(folder), "resumed", **arguments)
    stop_after(first, 3, saved=3)
    resumed = make_trainer(str(folder), "resumed", **arguments)
    assert resumed.state.step == 3 and resumed.train() == 0
    resumed.close()
    return folder


@pytest.fixture
def command(capsys):
    return caller(load_tool("checkpoint"), capsys)


def test_a_resumed_run_is_the_same_bit_for_bit_and_draws_the_same_guided_samples(folder):
    wanted, found = (
        checkpoint_tensors(folder / name / "checkpoint" / "step-00000006") for name in ("straight", "resumed")
    )
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "model.embedding.waves.freqs" in found and "ema.ema.embedding.waves.freqs" not in found
    grids = [folder / name / "samples" / "step-00000006.png" for name in ("straight", "resumed")]
    assert grids[0].read_bytes() == grids[1].read_bytes()


def test_weights_come_back_from_the_published_layout_bit_for_bit(folder, command, tmp_path):
    run, published, back = folder / "straight", tmp_path / "published.safetensors", tmp_path / "back.safetensors"
    code, output, error = command("export", run, "--format", "edm2", "--output", published)
    assert code == 0 and "edm2 layout" in output and "without logvar_fourier.freqs" in error
    torch.save({"EMA": load_file(published), "opt": {"step": 6}}, tmp_path / "published.pt")
    words = ["--format", "edm2", "--config", run / "config.toml", "--output", back]
    code, output, error = command("import", tmp_path / "published.pt", *words)
    assert code == 0 and "EDM2's code passes ln(sigma) / 4" in error and "taken from 'EMA'" in error
    tensors = checkpoint_tensors(run / "checkpoint" / "step-00000006")
    found = load_file(back)
    for name, tensor in found.items():
        average = tensors.get(f"ema.ema.{name}")
        assert torch.equal(tensor, tensors[f"model.{name}"] if average is None else average), name
    assert len(found) == sum(name.startswith("model.") for name in tensors)
    # Waves of a noise level are no weights: rounded, they would be others.
    assert command("import", tmp_path / "published.pt", *words, "--dtype", "bfloat16", "--overwrite")[0] == 0
    rounded = load_file(back)
    assert torch.equal(rounded["embedding.waves.freqs"], found["embedding.waves.freqs"])
    assert rounded["input.weight"].dtype == torch.bfloat16


class PublishedNetwork:
    """Object of code that is not here."""

    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def test_a_pickle_of_classes_is_refused_with_the_way_to_convert_it(folder, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, output = tmp_path / "edm2-img512-s.pkl", tmp_path / "x.safetensors"
    source.write_bytes(pickle.dumps({"ema": PublishedNetwork()}))
    words = ["--config", folder / "straight" / "config.toml", "--output", output]
    code, _, error = command("import", source, "--format", "edm2", *words)
    assert code == 2 and len(error.splitlines()) == 1 and str(source) in error
    assert "where NVlabs' code is installed, torch.save(pickle.load(open(FILE, 'rb'))['ema'].state_dict()" in error
    assert not Path("executed").exists() and not output.exists()
    code, _, error = command("import", source, "--format", "dit", *words)
    assert code == 2 and error == "--format dit: is not of model.name = edm2 (its published layouts are edm2, edm2_port)\n"
