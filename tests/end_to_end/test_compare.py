"""scripts/compare.py on small run folders written by hand."""

import html
import html.parser
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.forked import ROOT, run_script
from torchtitan.runs.compare import tables
from torchtitan.runs.compare.charts import Charts, Panel
from torchtitan.runs.compare.noise import without_noise
from torchtitan.runs.compare.page import compare_page
from torchtitan.runs.compare.tables import group_table, next_steps, notes
from torchtitan.runs.compare.text import MISSING, interval_text
from torchtitan.runs.record import group_by_seed, read_run, read_runs
from torchtitan.statistics.interval import mean_interval, positive_interval
from torchtitan_dit.commands import compare as command

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOLD = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"

CONFIG = """
[job]
name = "{name}"
[objective]
timesteps.name = "uniform"
[optimizer]
lr = {lr}
[training]
steps = 100
global_batch_size = 16
[metrics]
loss_bins = 2
[debug]
seed = {seed}
"""


def write_run(folder: Path, seed: int = 0, lr: float = 1e-3, every: int = 10, steps: int = 100) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(name=folder.name.replace('"', ""), lr=lr, seed=seed))
    points = []
    for step in range(every, steps + 1, every):
        loss = 3.0 / (1 + step / 20) + 0.013 * seed + 0.001 * (step * 7 % 11)
        points.append({
            "step": step, "loss_metrics/global_avg_loss": loss, "loss_by_bin/0": loss * 0.9,
            "loss_by_bin/1": loss * 1.1, "grad_norm": loss / 2, "lr": lr,
            "throughput(img/s)": 1000.0 + step + seed, "memory/max_active(GiB)": 1.5,
            "time_metrics/end_to_end(s)": 0.016, "time_metrics/data_loading(%)": 1.25, "n_images_seen": 16 * step,
        })
        if step % 50 == 0:
            held_out = {"validation_metrics/loss": loss + 0.1, "validation_metrics/ema/loss": loss + 0.2}
            points.append({"step": step} | held_out)
            Image.new("RGB", (20, 10), (step, 0, 0)).save(folder / "samples" / f"step-{step:08d}.png")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    summary = {
        "status": "completed", "step": steps, "num_parameters": 1234567, "layout": "FSDP over 8", "device": "H200",
        "evaluation": {"step": steps, "accuracy": {"value": 0.8125}, "fd": {"value": float("inf")}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def compare(*arguments: object) -> subprocess.CompletedProcess:
    return run_script("scripts/compare.py", *map(str, arguments))


class Page(html.parser.HTMLParser):
    """A page read strictly: elements must close in order; keeps text, attributes and counts."""

    EMPTY = ("meta", "input", "img")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.cells: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data

    def values(self, tag: str, name: str) -> list[str]:
        return [value for of_tag, of_name, value in self.attributes if (of_tag, of_name) == (tag, name)]

    def assert_needs_no_network(self) -> None:
        outside = [one for one in self.attributes if one[1] in ("src", "href", "srcset", "data", "action")
                   and not one[2].startswith("data:image/png;base64,")]
        assert not outside


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two settings, the first with three seeds, one run logged at another interval, one killed and damaged."""
    folder = tmp_path_factory.mktemp("compare")
    runs = [write_run(folder / f"base-seed{seed}", seed) for seed in range(3)]
    runs.append(write_run(folder / "high<b>&\"lr", lr=3e-3, every=4))
    runs.append(write_run(folder / "killed", lr=5e-3, steps=60))
    (runs[-1] / "summary.json").unlink()
    with open(runs[-1] / "metrics.jsonl", "a") as file:
        file.write('{"step": 65, "grad_no')
    (runs[-1] / "samples" / "step-00000050.png").write_text("no picture")
    output = folder / "new" / "folder" / "page.html"
    result = compare(*runs, runs[0], "--output", output, "--smoothing", 25)
    assert result.returncode == 0, result.stderr
    return Page(output), runs, output


def test_the_command_that_trains_longer_starts_as_many_processes(tmp_path, monkeypatch):
    place = write_run(tmp_path / "hsdp")
    with open(place / "config.toml", "a") as file:
        file.write("\n[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2\n")
    assert list(dict(next_steps(read_run(place)))) == ["compare with another run"]  # there is no checkpoint yet
    (place / "checkpoint" / "step-00000100").mkdir(parents=True)
    commands = dict(next_steps(read_run(place)))
    assert commands["train longer"].startswith(f"NGPU=4 scripts/train.sh {place}/config.toml --training.steps 200")
    monkeypatch.setattr(tables, "pasted", lambda name: f"torchtitan-dit {name}")
    started = "torchrun --standalone --nproc_per_node 4 -m torchtitan_dit train "
    assert dict(next_steps(read_run(place)))["train longer"].startswith(started)
    (place / "summary.json").unlink()
    assert "train longer" not in dict(next_steps(read_run(place)))  # it is training, or the same command resumes it


def test_groups_are_compared_by_seeds_that_they_have_in_common(tmp_path):
    places = [write_run(tmp_path / f"{lr:g}-{seed}", seed, lr) for lr in (1e-3, 3e-3) for seed in range(4 if lr < 2e-3 else 3)]
    point = {"step": 100, "validation_metrics/loss": 0.75, "validation_metrics/ema/loss": 0.75}
    for place, other in zip(places[4:], (0.5, 0.75, 0.25), strict=True):
        final = {key: value if key == "step" else value + other for key, value in point.items()}
        with open(place / "metrics.jsonl", "a") as file:
            file.write(json.dumps(final) + "\n")
    for place in places[:4]:
        with open(place / "metrics.jsonl", "a") as file:
            file.write(json.dumps(point) + "\n")
    columns, (first, second) = group_table(group_by_seed(read_runs(places)), ["ema"])
    half = 4.302653 * 0.25 / 3**0.5  # of three differences, of which the deviation is 0.25
    assert columns[-1].startswith("less the first group's") and first[-1] == MISSING and second[1] == "3"
    assert second[-1] == f"0.50 ± {half:.2f}"
    (places[4] / "config.toml").write_text((places[4] / "config.toml").read_text().replace("uniform", "logit_normal"))
    assert len(group_table(group_by_seed(read_runs(places)), ["ema"])[0]) == len(columns) - 1
    for place in places:  # held-out losses at given times are comparable
        with open(place / "config.toml", "a") as file:
            file.write("\n[validation]\ntimesteps = [0.25, 0.75]\n")
    assert group_table(group_by_seed(read_runs(places)), ["ema"])[0] == columns


def test_means_leave_out_runs_that_had_fewer_steps(tmp_path):
    places = [write_run(tmp_path / f"r{seed}", seed, steps=50 if seed == 2 else 100) for seed in range(3)]
    groups = group_by_seed(read_runs(places))
    _, [row] = group_table(groups, [])
    _, [finished] = group_table(group_by_seed(read_runs(places[:2])), [])
    assert row[1] == "2 of 3" and row[2:] == finished[2:]
    assert "2 of 3: the means leave out" in compare_page(read_runs(places))
    assert "of 3: the means" not in compare_page(read_runs(places[:2]))


def test_keys_that_change_no_loss_leave_runs_comparable_and_an_alignment_does_not(tmp_path):
    places = [write_run(tmp_path / name) for name in ("one", "two")]
    for place, keys in zip(places, ("[validation]\ninterval = 5", "[validation]\ninterval = 50"), strict=True):
        with open(place / "config.toml", "a") as file:
            file.write(f"\n{keys}\n")
    assert not [note for note in notes(read_runs(places)) if "differ in" in note]
    with open(places[1] / "config.toml", "a") as file:
        file.write('\n[alignment]\nteacher = "dinov2"\n')
    (note,) = [note for note in notes(read_runs(places)) if "differ in" in note]
    assert note == "The runs differ in alignment.teacher: training losses do not rank them; held-out ones, at equal times, do."


def test_page_is_well_formed_and_needs_no_network(page):
    parsed, _, output = page
    parsed.assert_needs_no_network()
    assert not re.search(r"https?:|url\(|@import|high<b>", output.read_text())
    assert len(parsed.values("img", "src")) == 3 * 2 + 1 and "no grid at step 100" in parsed.text
    assert "step-00000050.png cannot be read" in parsed.text


def test_tables_hold_the_numbers_of_the_metrics(page):
    parsed, runs, _ = page
    tails = []
    for run in runs:
        lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
        losses = [json.loads(line).get("loss_metrics/global_avg_loss") for line in lines]
        losses = [loss for loss in losses if loss is not None]
        tails.append(statistics.median(losses[len(losses) // 2 :]))
        held_out = [json.loads(line) for line in lines if "validation" in line][-1]
        for value in (tails[-1], held_out["validation_metrics/loss"], held_out["validation_metrics/ema/loss"]):
            assert any(f"{value:.4g}" in cell for cell in parsed.cells), (run.name, value)
    seeds = tails[:3]
    half = 4.302653 * statistics.stdev(seeds) / 3**0.5
    half_text = f"{half:.2g}"
    assert f"{statistics.fmean(seeds):.{len(half_text) - 2}f} ± {half_text}" in parsed.cells
    for text in ("1,234,567", "FSDP over 8", "H200", "0.8125", "1,600", "60 of 100", "0.003", "0, 1, 2"):
        assert text in parsed.cells, text


def test_page_says_what_was_done_and_what_is_missing(page):
    parsed, _, _ = page
    for text in (
        "killed: 1 line of metrics.jsonl could not be read and left out", "no summary (running or killed)",
        "base (3 seeds)", "Student's t over seeds", "Centred running mean over 25 steps", "t in 0.00–0.50",
        "Held-out loss, EMA “ema”", "images seen", "steps", "Comparison of 5 runs",
    ):
        assert text in parsed.text, text
    assert "differing keys" in parsed.cells and "optimizer.lr" in parsed.cells


def test_curve_of_a_run_passes_through_its_points(tmp_path):
    run = write_run(tmp_path / "alone")
    (tmp_path / "page.html").write_text(compare_page(read_runs([run]), smoothing=0))
    page = Page(tmp_path / "page.html")
    page.assert_needs_no_network()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss_metrics/global_avg_loss"] for line in lines if "loss_by_bin" in line]
    path = re.search(r'<g class="g0"><title>alone</title><path d="M ([^"]*)"', (tmp_path / "page.html").read_text())[1]
    first = [tuple(map(float, point.split())) for point in path.split("L")]
    assert len(first) == len(losses) == 10
    heights = [y for _, y in first]
    slope = (heights[-1] - heights[0]) / (losses[-1] - losses[0])
    assert slope < 0  # SVG counts downwards
    assert heights == pytest.approx([heights[0] + slope * (loss - losses[0]) for loss in losses], abs=0.15)
    steps = [x - first[0][0] for x, _ in first]
    assert steps == pytest.approx([steps[1] * i for i in range(10)], abs=0.6)
    assert "Over seeds" not in page.text and "Not smoothed" in page.text


def test_what_is_no_run_is_named_and_left_out_beside_runs_unless_it_is_missing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    (tmp_path / "empty").mkdir()
    others = tmp_path / "empty", run / "config.toml"
    left_out = f"left out, not a run's folder: {others[0]}, {others[1]}"
    result = compare(run, *others, tmp_path / "none", "--output", tmp_path / "page.html")
    assert result.returncode == 2 and not (tmp_path / "page.html").exists()
    assert result.stderr.splitlines() == [left_out, f"{tmp_path / 'none'}: no such folder"]
    (tmp_path / "sweep.toml").write_text("")  # of which the empty folder is then a part, and not named
    result = compare(run, *others, tmp_path / "none", "--output", tmp_path / "page.html")
    assert result.stderr.splitlines()[0] == f"left out, not a run's folder: {others[1]}"
    (tmp_path / "sweep.toml").unlink()
    result = compare(*others, "--output", tmp_path / "page.html")
    problems = [line.split(": ")[1].split(" (")[0] for line in result.stderr.splitlines()]
    assert result.returncode == 2 and problems == ["not a run's folder", "not a folder"]
    result = compare(run, *others, "--output", tmp_path / "page.html")
    assert (result.returncode, result.stderr.splitlines()) == (0, [left_out]) and (tmp_path / "page.html").exists()
    result = compare(run, "--output", tmp_path / "empty")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "cannot be written" in result.stderr


def log_losses(folder: Path, losses: list[float]) -> Path:
    """Run of nothing but losses, one a step."""
    folder.mkdir()
    points = [{"step": step, "loss_metrics/global_avg_loss": loss} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return folder


@pytest.mark.parametrize("times, shift, says", [
    ("[0.2, 0.8]", 1, "training losses do not rank them; held-out ones, at equal times, do."),
    ("[]", 1, "do not rank them; the loss by timestep"), ("[0.2, 0.8]", 2, "do not rank them; the loss by timestep"),
])  # fmt: skip
def test_losses_of_other_timesteps_are_ranked_at_equal_held_out_times_alone(tmp_path, times, shift, says):
    runs = []
    for number, name in enumerate(("uniform", "logit_normal")):
        runs.append(log_losses(tmp_path / name, [2.0, 1.0]))
        text = f"[objective]\nshift = {1 + (shift - 1) * number}\ntimesteps.name = '{name}'\n[validation]\ntimesteps = {times}\n"
        (runs[-1] / "config.toml").write_text(text)
    assert says in compare_page(read_runs(runs))


@pytest.mark.parametrize(("key", "says"), [
    ("prediction", "by timestep too, are errors of other predictions and do not rank them; samples say more"),
    ("name", "by timestep too, are of other objectives and do not rank them; samples say more"),
    ("weighting.name", "do not rank them; the loss by timestep"), ("preconditioning", None),
    ("uncertainty_lr_scale", "training losses do not rank them; held-out ones"),
    ("path", "do not rank them; the loss by timestep"),
])  # fmt: skip
def test_errors_of_other_predictions_are_not_said_to_rank_runs(tmp_path, key, says):
    for name in ("a", "b"):
        (log_losses(tmp_path / name, [2.0, 1.0]) / "config.toml").write_text(f"[objective]\n{key} = '{name}'\n")
    page = compare_page(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert says in page if says else "do not rank them" not in page


def test_caches_may_differ_in_prompts_alone(tmp_path):
    for number, name in enumerate(("dog-0123456789abcdef", "dog-fedcba9876543210", "dog")):
        text = f"[data]\nname = 'latents'\npath = '/somewhere/{name}/train'\n"
        (log_losses(tmp_path / str(number), [2.0, 1.0]) / "config.toml").write_text(text)
    for others, said in ((("0", "1"), True), (("0", "2"), False)):
        page = compare_page(read_runs([tmp_path / name for name in others]))
        assert "do not rank them" in page and ("unless their caches differ in the prompts of previews alone" in page) == said


def test_page_of_one_run_leads_from_its_curves_to_its_commands(tmp_path):
    run = write_run(tmp_path / "a run")
    (run / "checkpoint" / "step-00000100").mkdir(parents=True)
    Image.new("RGB", (20, 10)).save(run / "samples" / "step-00000150.png")  # of a future that it went back from
    (run / "gns").mkdir()
    Image.new("RGB", (90, 144)).save(run / "gns" / "noise_scale.png")
    scale = {"headline": 1.0, "b_simple": 20.0, "lower": 8.0, "upper": 12.0}
    further = {"gns/more_steps": 300.0, "gns/samplers/neyman/ratio": 0.9, "gns/samplers/neyman/lower": 0.6}
    with open(run / "metrics.jsonl", "a") as file:
        point = {"step": 100, "n_images_seen": 1600} | further
        point |= {f"gns/plain/sketch/all/{key}": value for key, value in scale.items()}
        file.write(json.dumps(point) + "\n")
    (tmp_path / "page.html").write_text(compare_page(read_runs([run])))
    page = Page(tmp_path / "page.html")
    page.assert_needs_no_network()
    assert page.values("section", "id") == ["runs", "curves", "bins", "noise", "costs", "samples", "next", "configuration"]
    assert page.values("img", "alt") == ["gradient noise scale of a run", "samples at step 50", "samples at step 100"]
    assert "batch 16 is large: 4 would need at least 43 % fewer images" in page.text  # 1 - (1 + 4 / 12) / (1 + 16 / 12)
    assert "not enough signal to choose another sampler of timesteps: measure about 300 more steps." in page.text
    assert "measured on H200; other hardware gives other numbers" in page.text
    commands = [cell for cell in page.cells if f"'{run}'" in cell]
    assert [words.partition(".py ")[0] for words in commands[:-1]] == [
        f".venv/bin/python scripts/{name}" for name in ("sample", "checkpoint", "evaluate", "evaluate", "compare")
    ]
    assert commands[-1].startswith("scripts/train.sh ")
    here = f"--job.dump_folder {tmp_path} --job.name 'a run'"  # its configuration names another place
    assert commands[-1].endswith(f"config.toml --training.steps 200 {here}") and not page.values("input", "id")[2:]


def test_watched_page_is_rewritten_when_the_run_logs_and_is_complete_when_it_ends(tmp_path, monkeypatch, capsys):
    run, output = log_losses(tmp_path / "run", [3.0, 2.0]), tmp_path / "page.html"
    trainer = subprocess.Popen([sys.executable, "-S", "-c", HOLD, run / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert trainer.stdout.readline()
    first = []

    def unchanged(_):
        first.append((os.stat(output).st_ino, output.read_text()))

    def logs(_):
        assert os.stat(output).st_ino == first[0][0] and "location.reload" in first[0][1]
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "loss_metrics/global_avg_loss": 1.0}\n')

    def ends(_):
        assert "reloadSeconds = 5" in (page := output.read_text()) and page != first[0][1] and '<td>3</td>' in page
        trainer.communicate()

    waits = iter([unchanged, logs, ends])
    sleeping = SimpleNamespace(sleep=lambda seconds: next(waits)(seconds), monotonic=time.monotonic)
    monkeypatch.setattr(command, "time", sleeping)
    assert command.main([str(run), "--watch", "--output", str(output)]) == 0
    assert "reloadSeconds = 0" in output.read_text() and '<td>3</td>' in output.read_text()
    assert [line.partition(": ")[2][:8] for line in capsys.readouterr().out.splitlines()] == ["1 run, 0", "complete"]


def test_a_run_that_no_process_trains_is_not_watched(tmp_path, capsys):
    run, output = log_losses(tmp_path / "run", [3.0, 2.0]), tmp_path / "page.html"
    assert command.main([str(run), "--watch", "--output", str(output)]) == 0
    assert capsys.readouterr().out.endswith(" MB, not watched: no process trains it\n")


@pytest.mark.parametrize(("settings", "tag", "said"), [
    ({"gns.enable": False}, "loss", "Nothing measured by single samples (where"),
    ({"gns.enable": True, "gns.single_pass": True}, "gns/plain/ranks/all/noise", "Nothing measured by single samples yet (where"),
])  # fmt: skip
def test_a_page_without_noise_names_only_what_is_logged(settings, tag, said):
    text = without_noise([SimpleNamespace(settings=settings, tags=(tag,))])
    assert text.startswith(said) and ("is in metrics.jsonl" in text) == tag.startswith("gns/")


def test_ctrl_c_ends_a_watch_with_one_line(tmp_path, monkeypatch, capsys):
    run, output = log_losses(tmp_path / "run", [3.0, 2.0]), tmp_path / "page.html"

    def interrupt(_):
        assert "reloadSeconds = 5" in output.read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "is_locked", lambda _: True)
    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=interrupt))
    assert command.main([str(run), "--watch", "--output", str(output)]) == 130
    assert "reloadSeconds = 0" in output.read_text()
    assert capsys.readouterr().err == "stopped\n"


def test_runs_with_equal_curves_are_said_to_be_equal(tmp_path):
    runs = [log_losses(tmp_path / name, losses) for name, losses in (("a", [2.0, 1.0]), ("b", [2.0, 1.0]), ("c", [2.0, 1.5]))]
    assert "Equal at every logged point, one line on another: a, b." in compare_page(read_runs(runs))
    assert "Equal at every" not in compare_page(read_runs(runs[1:]))
    runs += [log_losses(tmp_path / "d", [2.0, 1.0 + 1e-7]), log_losses(tmp_path / "e", [2.0, 1.0 + 1e-5])]
    assert "one line on another: a, b, d (to 1e-6)." in compare_page(read_runs(runs))


def test_a_method_is_charted_beside_a_plain_run_by_what_both_have(tmp_path):
    plain, one, other = (log_losses(tmp_path / name, [2.0, 1.0]) for name in ("plain", "one", "other"))
    for method, nearest_data in ((one, -0.2), (other, -0.9)):
        lines = [json.loads(line) for line in (method / "metrics.jsonl").read_text().splitlines()]
        added = {"alignment_loss/0": nearest_data, "alignment_loss/1": -0.5, "validation_metrics/two_times_loss": -nearest_data}
        for line in lines:
            line["loss_metrics/global_avg_weighted_error"] = line["loss_metrics/global_avg_loss"]
            line |= added | {"loss_metrics/global_avg_loss": 4.0 + nearest_data}
        (method / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def panels_of(*folders: Path) -> dict[str, Panel]:
        runs = read_runs(folders)
        return {panel.title: panel for panel in Charts(runs, group_by_seed(runs), 0).curves([])}

    panels = panels_of(plain, one, other)
    said = "Equal at every logged point, one line on another: "
    equal = {title: (panel.note or "").partition(said)[2] for title, panel in panels.items()}
    assert equal.pop("Training error") == "plain, one, other." and equal.pop("Training loss") == ""
    assert equal.pop("Alignment loss of the noisiest timesteps (-1: aligned)") == "one, other."
    assert equal == {"Held-out loss of two times (mean flow)": ""}
    assert list(panels_of(plain)) == ["Training loss"]


def test_intervals_of_times_stay_above_zero():
    assert interval_text(positive_interval([1.0, 2.0])) == "1.414 [0.01730, 115.6]"  # t = 12.706 times log(2) / 2 on each side
    assert interval_text(positive_interval([1.0, 1.01])) == "1.005 ± 0.064"
    assert interval_text(mean_interval([-1.0, 1.0])) == "0 ± 13"
    assert interval_text(mean_interval([0.843210, 0.843213148])) == "0.84321 ± 2e-5"
    assert interval_text(mean_interval([-0.0312, -0.031204])) == "-0.031202 ± 2.5e-5"


def test_style_fits_a_telephone_and_paper():
    style = (ROOT / "torchtitan/runs/templates/page.css").read_text()
    widths = re.findall(r"(?<!max-)\b(?:min-)?width:(\d+)px|minmax\((\d+)px", style)
    assert widths and all(int(max(found)) <= 390 for found in widths)
    narrow, paper = style.split("@media screen and (max-width:640px)")[1].split("@media print")
    assert "overflow-x:auto" in narrow and "position:static" in narrow
    for rule in ("color-scheme:light", "overflow:visible", "break-after:avoid", "figure, tr, .note { break-inside:avoid"):
        assert rule in paper
    assert "@media screen and (prefers-color-scheme: dark)" in style  # paper is white


# Asks, in the page: what is wider than the window or lies outside of it and of all that scrolls; the smallest text of charts in
# pixels; colours; charts with their headings.
ASKED = """<script>
const all = [...document.querySelectorAll('main *, header *')], figures = [...document.querySelectorAll('.panels figure')];
const outside = one => one.getBoundingClientRect().right > innerWidth + 1;
const size = one => { const {a, b} = one.getScreenCTM(); return parseFloat(getComputedStyle(one).fontSize) * Math.hypot(a, b) };
const found = {
  window: innerWidth, width: document.documentElement.scrollWidth,
  outside: all.filter(one => outside(one) && !one.closest('.scroll, .wide, #noise figure')).length,
  scrolled: all.filter(one => one.matches('.scroll') && one.scrollWidth > one.clientWidth + 1).length,
  least: Math.min(...[...document.querySelectorAll('svg text')].filter(one => one.getClientRects().length).map(size)),
  paper: getComputedStyle(document.body).backgroundColor, line: getComputedStyle(document.querySelector('.swatch path')).stroke,
  charts: figures.filter(one => one.querySelector('figcaption') && one.clientHeight).length,
};
parent.document.title = JSON.stringify(found);
</script></body>"""


def in_browser(page: Path, folder: Path, width: int, scheme: str, paper: bool = False) -> dict:
    """Ask a browser what it shows of a page at a width in pixels, in a frame: a window has 500; paper: by the style of print."""
    text = page.read_text()
    if paper:
        text = text.replace("@media screen", "@media not all").replace("@media print", "@media all")
    framed = html.escape(text.replace("</body>", ASKED))
    (folder / "asked.html").write_text(f'<iframe width="{width}" height="900" style="border:0" srcdoc="{framed}"></iframe>')
    scheme = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,1000", scheme]
    command += ["--dump-dom", (folder / "asked.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(re.search(r"<title>(.*?)</title>", shown.stdout)[1])


@pytest.mark.skipif(not BROWSER, reason="no Chromium or Chrome is found")
def test_page_in_a_browser_fits_a_telephone_and_paper_and_has_the_colours_of_both(page, tmp_path):
    telephone = in_browser(page[2], tmp_path, 390, "dark")
    assert telephone["width"] <= telephone["window"] == 390 and telephone["outside"] == 0 and telephone["least"] >= 9
    assert (telephone["paper"], telephone["line"]) == ("rgb(21, 24, 29)", "rgb(74, 159, 224)")
    paper = in_browser(page[2], tmp_path, 720, "dark", paper=True)
    assert paper["width"] <= paper["window"] and paper["outside"] == paper["scrolled"] == 0 and paper["least"] >= 9
    light = in_browser(page[2], tmp_path, 1280, "light")
    assert (paper["paper"], paper["line"]) == (light["paper"], light["line"]) == ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
    assert paper["charts"] == telephone["charts"] == light["charts"] >= 8
