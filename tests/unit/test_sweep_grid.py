"""A sweep's file becomes cells; what makes no sense is refused in one line."""

from pathlib import Path

import pytest

from tests.launcher import ROOT
from torchtitan.config.job import load_config
from torchtitan.experiments.command_lines import check_cells, run_arguments
from torchtitan.experiments.grid import SweepError, read_sweep
from torchtitan.experiments.record import SweepFolder
from torchtitan.experiments.runner import SweepPlan, Task
from torchtitan.files.run_lock import Busy
from torchtitan_dit.commands.sweep import main, show

SWEEP = """
processes = 8
hsdp_shard = 4
[fixed]
model.flavor = "debug"
data.name = "synthetic"
training.steps = 4
lr_scheduler.warmup_steps = 0
[axes]
training.local_batch_size = [4, 1, 2]
layout = ["ddp", "fsdp", "hsdp"]
dtype = ["bfloat16", "float32"]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def test_the_grid_is_the_product_of_the_axes_with_rising_batches(tmp_path):
    sweep = read_sweep(write(tmp_path, SWEEP))
    assert sweep.settings.name == "grid" and len(sweep.cells) == 18
    assert len({cell.id for cell in sweep.cells}) == 18
    assert [cell.axes["training.local_batch_size"] for cell in sweep.cells] == [1, 2, 4] * 6
    assert [cell.axes["layout"] for cell in sweep.cells[::6]] == ["ddp", "fsdp", "hsdp"]
    assert sweep.cells[0].id == "batch=1_layout=ddp_dtype=bfloat16"
    signs = read_sweep(write(tmp_path, SWEEP + "training.global_batch_size = [-1, 1]\n"))  # names that differ in a sign
    assert sum("global_batch_size=-1_" in cell.id for cell in signs.cells) == 18 == len(signs.cells) - 18


@pytest.mark.parametrize(("layout", "degrees"), [("ddp", (8, 1)), ("fsdp", (1, 8)), ("hsdp", (2, 4))])
def test_layouts_become_degrees(tmp_path, layout, degrees):
    sweep = read_sweep(write(tmp_path, SWEEP))
    cell = next(cell for cell in sweep.cells if cell.axes["layout"] == layout and cell.axes["dtype"] == "float32")
    config = load_config(run_arguments(cell, 2, tmp_path, None), cell.processes)
    found = config.parallelism
    assert (found.data_parallel_replicate_degree, found.data_parallel_shard_degree) == degrees
    assert config.training.mixed_precision_param == "float32" and config.debug.seed == 2
    assert config.job.name == f"{cell.id}_r2" and Path(config.job.dump_folder) == tmp_path
    assert not (config.checkpoint.enable or config.sampling.enable)


CONTEXT = "parallelism.context_parallel_degree"


@pytest.mark.parametrize("place", ["[fixed]", "[axes]", "base"])
def test_layouts_are_of_the_processes_with_images_of_their_own(tmp_path, place):
    """8 processes of which pairs share tokens: 4 x 1, 1 x 4, and, where copies have 2 shards, 2 x 2."""
    text = SWEEP.replace("hsdp_shard = 4", "hsdp_shard = 2")
    if place == "base":
        (tmp_path / "base.toml").write_text(f"{CONTEXT} = 2\n")
        text = 'base = "base.toml"' + text
    else:
        text = text.replace(place, f"{place}\n{CONTEXT} = {[2] if place == '[axes]' else 2}")
    sweep = read_sweep(write(tmp_path, text))
    check_cells(sweep, sweep.cells, tmp_path)
    configs = [load_config(run_arguments(cell, 0, tmp_path, sweep.base), cell.processes) for cell in sweep.cells]
    found = {cell.axes["layout"]: tuple(config.parallelism.degrees) for cell, config in zip(sweep.cells, configs, strict=True)}
    assert found == {"ddp": (4, 1, 2), "fsdp": (1, 4, 2), "hsdp": (2, 2, 2)}


def test_layouts_without_enough_processes_beside_the_shared_tokens_are_refused(tmp_path):
    shared = SWEEP.replace("[fixed]", f"[fixed]\n{CONTEXT} = 8")
    with pytest.raises(SweepError, match="fsdp needs 2 groups of 8 processes or more"):
        read_sweep(write(tmp_path, shared))
    with pytest.raises(SweepError, match="hsdp needs a multiple of hsdp_shard = 4 groups of 2 processes, twice or more, not 4"):
        read_sweep(write(tmp_path, shared.replace(f"{CONTEXT} = 8", f"{CONTEXT} = 2")))


def test_excluded_points_are_left_out(tmp_path):
    first = '[[exclude]]\nlayout = ["ddp", "fsdp"]\ntraining.local_batch_size = 4\n'
    text = SWEEP + first + '[[exclude]]\ndtype = "float32"\n'
    cells = read_sweep(write(tmp_path, text)).cells
    points = {(cell.axes["layout"], cell.axes["training.local_batch_size"]) for cell in cells}
    assert points == {(layout, batch) for layout in ("ddp", "fsdp", "hsdp") for batch in (1, 2)} | {("hsdp", 4)}
    assert len(cells) == len(points)


def test_processes_can_be_an_axis(tmp_path):
    text = SWEEP.replace("processes = 8", "").replace('"hsdp"', "").replace("[axes]", "[axes]\nprocesses = [2, 4]")
    sweep = read_sweep(write(tmp_path, text))
    assert {(cell.axes["processes"], cell.processes) for cell in sweep.cells} == {(2, 2), (4, 4)}
    check_cells(sweep, sweep.cells, tmp_path)


def test_base_is_relative_to_the_file_and_its_seed_counts(tmp_path):
    (tmp_path / "base.toml").write_text('[model]\nflavor = "debug"\n[debug]\nseed = 40\n[data]\nname = "synthetic"\n')
    sweep = read_sweep(write(tmp_path, 'base = "base.toml"\n[axes]\noptimizer.lr = [1e-3]\n'))
    config = load_config(run_arguments(sweep.cells[0], 2, tmp_path, sweep.base), 1)
    assert config.model.flavor == "debug" and config.debug.seed == 42 and config.optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[axes]", "[axes]\ntraining.local_batchsize = [1]", "did you mean --training.local_batch_size"),
        ("[axes]", "[axes]\nlayouts = ['ddp']", "axes.layouts: is no axis (did you mean layout?)"),
        ("[4, 1, 2]", "[4, 0, 2]", "training.local_batch_size: must be at least 1"),
        ("[axes]", "[[exclude]]\nlayout = ['ddp', 'fsdp', 'hsdp']\n[axes]", "the grid is empty"),
        ("[axes]", "[[exclude]]\nlayout = 'tp'\n[axes]", "exclude.layout: 'tp' is not in the axis"),
        ("hsdp_shard = 4", "hsdp_shard = 8", "hsdp needs a multiple of hsdp_shard = 8 processes"),
        ("[fixed]", "[fixed]\nparallelism.data_parallel_shard_degree = 1", "which is set a second time"),
        ("processes = 8", "proceses = 8", "did you mean processes?"),
        ("processes = 8", "processes = 8\nwarmup_steps = 4", "warmup_steps: 4 leaves none of training.steps = 4"),
        ("processes = 8", "processes = 8\nbase = 'no.toml'", "no.toml: no such file"),
        ("processes = 8", "processes = 8\nautotune_multiple_of = 2", "no effect while autotune is false"),
        (SWEEP, "[training]\nsteps = 4\n", "is the configuration of one run, no grid"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path, old, new, words):
    path = write(tmp_path, SWEEP.replace(old, new))
    with pytest.raises(SweepError) as caught:
        sweep = read_sweep(path)
        check_cells(sweep, sweep.cells, tmp_path)
    assert words.replace("'", '"') in str(caught.value).replace("'", '"') and "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_all_axes_that_make_no_sense_are_refused_at_once(tmp_path):
    path = write(tmp_path, SWEEP.replace("[axes]", "[axes]\nprocesess = [0]\ncheckpointing = ['ful']"))
    with pytest.raises(SweepError) as caught:
        read_sweep(path)
    first, second = str(caught.value).splitlines()
    assert first == f"{path}: axes.procesess: is no axis (did you mean processes?)"
    assert second.startswith(f"{path}: axes.checkpointing: must be one of none, ")


def test_cells_for_other_machines_are_not_judged_by_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = SWEEP.replace('[fixed]\n', '[fixed]\ntraining.attention_backend = "efficient"\n')
    sweep = read_sweep(write(tmp_path, text.replace('"float32"]', '"float8"]')))
    with pytest.raises(SweepError, match="efficient is for CUDA"):
        check_cells(sweep, sweep.cells, tmp_path)
    check_cells(sweep, sweep.cells, tmp_path, elsewhere=True)


def test_a_folder_is_of_one_sweep(tmp_path):
    folder = SweepFolder(tmp_path / "results")
    first = read_sweep(write(tmp_path, SWEEP))
    with folder.held(first):
        folder.add({"cell": "a", "repeat": 0, "status": "oom"})
        with pytest.raises(Busy, match="this process writes here already"), SweepFolder(folder.path).held(first):
            pass
    folder.check(read_sweep(write(tmp_path, "# again\nrepeats = 2\n" + SWEEP)))
    folder.check(read_sweep(write(tmp_path, SWEEP.replace("[4, 1, 2]", "[4, 1, 8]"))))  # values come and go
    axes = "axes.training.local_batch_size, axes.layout, axes.dtype"
    with pytest.raises(SweepError, match=f"another sweep, sweep.toml: axes: {axes} -> {axes}, axes.optimizer.lr"):
        folder.check(read_sweep(write(tmp_path, SWEEP + "optimizer.lr = [1e-3]\n")))
    with pytest.raises(SweepError, match="sweep.toml: fixed.training.steps: 4 -> 5"):
        folder.check(read_sweep(write(tmp_path, SWEEP.replace("training.steps = 4", "training.steps = 5"))))
    (folder.path / "sweep.toml").unlink()
    with pytest.raises(SweepError, match="has finished runs, but no sweep.toml"):
        folder.check(first)


def test_a_folder_is_of_one_base(tmp_path):
    folder, base = SweepFolder(tmp_path / "results"), tmp_path / "base.toml"
    base.write_text("[metrics]\nlog_freq = 2\n")
    path = write(tmp_path, 'base = "base.toml"\n' + SWEEP)
    with folder.held(read_sweep(path)):
        assert folder.base.read_text() == base.read_text()
    base.write_text("[metrics]\nlog_freq = 3\n")
    with pytest.raises(SweepError, match="base.toml: metrics.log_freq: 2 -> 3"):
        folder.check(read_sweep(path))


def test_a_torn_last_line_does_not_count_and_a_damaged_one_is_named(tmp_path):
    folder, sweep = SweepFolder(tmp_path / "results"), read_sweep(write(tmp_path, SWEEP))
    row = {"cell": "a", "repeat": 0, "status": "ok"}
    with folder.held(sweep):
        folder.add(row)
    state = folder.path / "sweep.jsonl"
    whole = state.read_bytes()
    state.write_bytes(whole + b'{"cell": "b", "rep')
    assert folder.rows() == {("a", 0): row}
    with folder.held(sweep):
        folder.add(row | {"repeat": 1})
    assert set(folder.rows()) == {("a", 0), ("a", 1)}
    state.write_bytes(whole + b"{}\n" + whole)
    with pytest.raises(SweepError, match="sweep.jsonl: line 2 is damaged"):
        folder.rows()


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs" / "sweeps").glob("*.toml")), ids=lambda path: path.stem)
def test_the_grids_that_come_with_the_program_are_valid(path, tmp_path):
    sweep = read_sweep(path)
    one_each = list({cell.arm(sweep.settings.order): cell for cell in sweep.cells}.values())
    check_cells(sweep, [cell for cell in one_each if cell.axes["dtype"] != "float8"], tmp_path)
    published = {"dit_0.5B": 252, "dit_7B": 396, "dit_7B_autotune": 36, "cpu": 24, "flavors": 100, "torchditan_0.5B": 252}
    assert sum(cell.axes["dtype"] == "bfloat16" for cell in sweep.cells) == published[path.stem]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], "nowhere.toml: no such file (give a sweep's TOML file)"),
        (["train_configs/sweeps/cpu.toml", "--only", "layout"], "must be NAME=VALUE"),
        (["train_configs/sweeps/cpu.toml", "--only", "layout=tp"], "there are: ddp, fsdp, hsdp"),
    ],
)
def test_command_line(arguments, words, tmp_path, capsys):
    try:
        code = main([*arguments, "--output", str(tmp_path / "out")])
    except SystemExit as exit_:
        code = exit_.code
    output = capsys.readouterr()
    assert code == 2 and words in output.err and output.err.count("\n") == 1, output.err
    assert output.out == "" and not (tmp_path / "out").exists()


def test_checkpointing_names_kinds_of_recomputation(tmp_path):
    text = SWEEP + 'checkpointing = ["none", "selective", "every_second_block", "full"]\n'
    found = {}
    for cell in read_sweep(write(tmp_path, text)).cells:
        config = load_config(run_arguments(cell, 0, tmp_path, None), cell.processes).activation_checkpoint
        found[cell.axes["checkpointing"]] = (config.mode, config.every)
    assert found == {
        "none": ("none", 1), "selective": ("selective", 1), "every_second_block": ("full", 2), "full": ("full", 1),
    }  # fmt: skip


def test_all_impossible_cells_are_named_with_the_way_to_leave_them_out(tmp_path):
    sweep = read_sweep(write(tmp_path, SWEEP + "training.global_batch_size = [64, 20]\n"))
    with pytest.raises(SweepError) as caught:
        check_cells(sweep, sweep.cells, tmp_path)
    lines = str(caught.value).splitlines()
    named = [cell.id for cell in sweep.cells if cell.axes["training.global_batch_size"] == 20]
    said = [name for line in lines for name in line.partition("(cells ")[2].partition("; or")[0].split(", ")]
    assert len(named) == 18 and sorted(said) == sorted(named)
    assert len(lines) == 3 and all(line.endswith("; or leave them out by [[exclude]])") for line in lines)
    with pytest.raises(SweepError) as caught:  # all: excluding helps nothing
        check_cells(sweep, [cell for cell in sweep.cells if cell.id in named], tmp_path)
    assert "exclude" not in str(caught.value)


def test_a_dry_run_checks_the_launcher_and_shows_what_slurm_is_asked_for(tmp_path, monkeypatch, capsys):
    sweep = write(tmp_path, SWEEP.replace("processes = 8", "processes = 8\nneeds = {gpus = 8}"))
    words = [str(sweep), "--output", str(tmp_path / "mine"), "--slurm", "partition=gpu", "--dry-run"]
    assert main(words) == 2
    assert capsys.readouterr().err == "--slurm: is an option of --launcher slurm (add it, or remove --slurm)\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*words, "--launcher", "slurm", "--slurm", "nodes=2"]) == 2
    assert "--slurm nodes: a run takes one machine" in capsys.readouterr().err
    assert main([*words[:-1], "--launcher", "slurm"]) == 2
    assert "--launcher slurm: there is no sbatch" in capsys.readouterr().err
    assert main([*words, "--launcher", "slurm"]) == 0  # a plan needs none
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "18 runs, 18 to run",
        "sbatch --job-name=mine-CELL --time=40 --nodes=1 --ntasks-per-node=1 --cpus-per-task=8 --gpus-per-node=8 --no-requeue"
        " --partition=gpu",
    ]
    assert not (tmp_path / "mine").exists()
    words[2] = str(tmp_path / "my runs")
    assert main([*words, "--launcher", "slurm"]) == 0 and "sbatch '--job-name=my runs-CELL' " in capsys.readouterr().out


def test_a_dry_run_of_a_large_grid_is_short_and_counts_every_run(tmp_path, monkeypatch, capsys):
    sweep = read_sweep(Path("dit_7B"))
    tasks = [Task(cell, 0) for cell in sweep.cells]
    show(SweepPlan(sweep, SweepFolder(tmp_path), tasks))
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 36 and last == "396 runs, 396 to run"
    assert lines[0] == (
        "dtype=bfloat16 layout=fsdp model.patch_size=8 activation_checkpoint.mode=none compile.enable=true"
        "  8 processes  11 to run"
    )
    monkeypatch.setattr("torchtitan_dit.commands.sweep._MOST_LINES", 10)
    show(SweepPlan(sweep, SweepFolder(tmp_path), tasks))
    assert capsys.readouterr().out.splitlines()[10:] == ["... and 286 runs more", "396 runs, 396 to run"]

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtitan_dit.commands.sweep.plan_sweep", interrupted)
    assert main([str(sweep.path), "--dry-run"]) == 130
    assert "the same command runs those that have not ended" in capsys.readouterr().err
