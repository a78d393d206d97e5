"""Run the commands of the README and of docs/index.md: python benchmarks/documented_commands.py [--put NAME=PATH]

Clones this checkout into a temporary folder and runs the commands there, in the order that they need each other: trainings
first. Long ones are shortened by options that the table names. PICTURES and FOLDER are made here, twenty small images each, and
so are small weights in published layouts; another capital word that stands for a file is given by --put, as
--put PHOTOGRAPHS=folder, or its commands are not run.
Writes benchmarks/results/documented_commands.md: command, verdict, seconds.
"""

import argparse
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan.config.job import load_config
from torchtitan.data import dataset_info
from torchtitan.files.weight_files import saved_buffers
from torchtitan.models import MODELS
from torchtitan.runs.folder import versions
from torchtitan.weights.network import new_network

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "documented_commands.md"
# What stands for a user's file or folder; of a run that no command here trains, its folder.
STANDS_FOR = re.compile(
    r"\b(?:PICTURES|PHOTOGRAPHS|FOLDER|TOKENIZER_FOLDER|WEIGHTS(?:\.pt)?|FILE\.toml|SWEEP\.toml|E\.yaml|imagenet_ci8x8\.safetensors|"
    r"(?<=initial_weights )dit\.safetensors|outputs/flux(?!_)|outputs/ablations_cpu)(?![\w/])"
)
# Of each published layout a small network.
PUBLISHED = {
    "dit": '[model]\nflavor = "DiT-S/2"\nnum_layers = 2\nlearned_variance = true\n[objective]\npath = "ddpm_linear"\n'
    'prediction = "noise"\npreconditioning = "index"\n[data]\nname = "synthetic"\nshape = [4, 16, 16]\nnum_classes = 10\n',
    "edm2": '[model]\nname = "edm2"\nflavor = "cifar"\nnum_blocks = 1\nmiddle_blocks = "decoder"\nchannels_per_head = 64\n'
    'pixel_norm_epsilon = "added_to_norm"\n[objective]\nprediction = "x0"\npreconditioning = "edm"\n[data]\n'
    'name = "synthetic"\nshape = [3, 32, 32]\nnum_classes = 10\n',
}
# Pattern: commands that make what a command needs, as its page does.
BEFORE = {
    "outputs/flux_cifar10": (
        ".venv/bin/python scripts/extract_latents.py --output latents/cifar10_captions --autoencoder identity "
        "--text-encoder stub:64 --pooled-encoder stub:64 --text-length 8 "
        "--class-captions 'a photo of a {}' --data.name cifar10 --data.path FOLDER && "
        "scripts/train.sh train_configs/flux_cifar10.toml --training.steps 2 --lr_scheduler.warmup_steps 1 "
        "--training.global_batch_size 8 --sampling.num_steps 2 --sampling.images_per_class 1"
    ),
}
DIGITS = {
    "--training.steps": "120", "--lr_scheduler.warmup_steps": "4", "--evaluation.enable": "false",
}
OPTION = DIGITS | {
    "--training.steps": "40", "--sampling.num_steps": "10", "--validation.num_images": "64",
}
TRAIN = r"scripts/train\.sh"
# Pattern: options that shorten a command that it is found in; the first pattern counts.
SHORTENED: tuple[tuple[str, dict[str, str]], ...] = (
    # Others draw from its checkpoint of step 300, and it is the same run on several processes.
    (rf"^(NGPU=4 )?{TRAIN}$", DIGITS | {"--training.steps": "320"}),
    (r"^--.*bfloat16", DIGITS | {"--training.steps": "8", "--sampling.num_steps": "2", "--validation.num_images": "64"}),
    (r"^--evaluation", {name: value for name, value in OPTION.items() if not name.startswith("--evaluation")}),
    (r"^--(model|training\.global)", OPTION | {"--training.steps": "6"}),
    (r"^--profiling", OPTION | {"--profiling.profile_freq": "20"}),
    (r"^--(?!job)", OPTION),
    (rf"^--job|{TRAIN}$|{TRAIN} train_configs/digits", DIGITS),
    (rf"{TRAIN} train_configs/edm2", {
        "--training.steps": "3", "--lr_scheduler.warmup_images": "20", "--training.global_batch_size": "20",
        "--sampling.num_steps": "2", "--sampling.images_per_class": "1", "--training.mixed_precision_param": "float32",
    }),
    (rf"{TRAIN} train_configs/cifar10", {
        "--training.steps": "3", "--lr_scheduler.warmup_steps": "1", "--training.global_batch_size": "20",
        "--sampling.num_steps": "2", "--sampling.images_per_class": "1", "--validation.num_images": "4",
        "--training.mixed_precision_param": "float32",  # bfloat16 takes a processor minutes a step
    }),
    (rf"{TRAIN} train_configs/my_images", {"--training.steps": "8", "--lr_scheduler.warmup_steps": "2"}),
    (rf"{TRAIN} train_configs/flux_lora", {"--training.steps": "4", "--lr_scheduler.warmup_steps": "1"}),
    (r"run_ablations_cpu\.sh", {"--dry-run": ""}),
    (r"scripts/sample\.py .*--count", {"--num-steps": "2"}),
    (r"scripts/evaluate\.py outputs", {"--count": "1000"}),
)  # fmt: skip
OF_LAUNCHER = re.compile(r"[EW]\d{4} |\*{5}|Setting OMP_NUM_THREADS")
NOT_ENDING = ("tensorboard --logdir",)  # stopped after some seconds: they serve
LONG = ("-m research", "benchmarks/", "autotune", "ema.py sweep")  # stopped after a minute
DIFFERENCE = 1  # exit code of `checkpoint.py diff`

E_YAML = """dataset: cifar
model_type: EDM
net_type: UNetE
diffusion: {sigma_data: 0.5, p_mean: -1.2, p_std: 1.2, sigma_min: 0.002, sigma_max: 80, rho: 7}
network:
  image_shape: [3, 32, 32]
  n_channels: 128
  ch_mults: [1, 2, 2, 2]
  is_attn: [False, True, False, False]
  dropout: 0.13
  n_blocks: 3
n_epoch: 2000
batch_size: 512
lrate: 2.0e-2
warm_epoch: 200
tref_epoch: 400
flip: True
ema: 0.9993
"""


@dataclass
class Row:
    """A command's outcome.

    Attributes:
        command: as documented.
        added: options that shortened it.
        verdict: ran, refused, failed, out of time, or not run.
        seconds: that it took.
        said: its last line where it did not end well.
    """

    command: str
    added: str
    verdict: str
    seconds: float = 0.0
    said: str = ""


def documented() -> list[str]:
    """Commands of the tables, trainings of the runs that others need first.

    A command stands in the last cell of its row; rows of scripts and benchmarks name files in the first one.
    """
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "index.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    commands = dict.fromkeys(row[-1].split("`")[1] for row in rows if row[-1].startswith("`"))
    first = ("scripts/train.sh", "scripts/train.sh train_configs/digits.toml --optimizer.lr 5e-4 --job.name lower-lr")
    later = ("train.sh", " encode ", " reference ")  # what others need, in turn
    rank = {command: next((place for place, word in enumerate(later) if word in command), len(later)) for command in commands}
    return sorted(commands, key=lambda command: (command not in first, command not in first[:1], rank[command]))


def shortened(command: str) -> str:
    """Options that shorten a command, without those that it gives itself."""
    options = next((options for pattern, options in SHORTENED if re.search(pattern, command)), {})
    given = shlex.split(command)
    return " ".join(f"{name} {value}".strip() for name, value in options.items() if name not in given)


def make_data(folder: Path) -> dict[str, str]:
    """Twenty small images as a folder of pictures and as CIFAR-10's files."""
    pictures, cifar = folder / "pictures", folder / "cifar10"
    pictures.mkdir()
    cifar.mkdir()
    rows = []
    for number in range(20):
        content = io.BytesIO()
        image = Image.effect_noise((320, 260), 12 * number + 10).convert("RGB")
        image.save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a photo of a colour")
        image.resize((32, 32)).save(content, "PNG")
        rows.append({"img": {"bytes": content.getvalue(), "path": ""}, "label": number % 10})
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), cifar / f"{split}-00000-of-00001.parquet")
    (folder / "E.yaml").write_text(E_YAML)
    return {
        "PICTURES": str(pictures), "FOLDER": str(cifar), "PHOTOGRAPHS": str(pictures), "E.yaml": str(folder / "E.yaml"),
        # The run of digits is exported, and analysed, by then.
        "dit.safetensors": "digits.safetensors", "outputs/ablations_cpu": "outputs",
    }  # fmt: skip


def make_weights(folder: Path, layout: str) -> dict[str, str]:
    """Weights of a small drawn network in a published layout, and the TOML file of such a network."""
    config_file, weights_file = folder / f"{layout}.toml", folder / f"{layout}.pt"
    config_file.write_text(PUBLISHED[layout])
    config = load_config(["--config", str(config_file)], 1)
    model = new_network(config, dataset_info(config.data), torch.device("cpu"))
    weights = dict(model.named_parameters()) | saved_buffers(model)
    published, _ = MODELS[config.model.name].layouts[layout].export_weights(weights, model)
    torch.save({name: tensor.detach() for name, tensor in published.items()}, weights_file)
    return {"WEIGHTS.pt": str(weights_file), "FILE.toml": str(config_file)}


def run(number: int, command: str, clone: Path, put: dict[str, str], most: float) -> Row:
    """Run one command in the clone."""
    added = shortened(command)
    if layout := next((layout for layout in PUBLISHED if f"WEIGHTS.pt --format {layout} " in command), None):
        put = put | make_weights(clone.parent, layout)
    missing = [word for word in STANDS_FOR.findall(command) if word not in put]
    if missing:
        return Row(command, "", f"not run: needs {missing[0]}")
    words = STANDS_FOR.sub(lambda found: shlex.quote(put[found[0]]), command)
    for before in (before for pattern, before in BEFORE.items() if pattern in command):
        prepared = STANDS_FOR.sub(lambda found: shlex.quote(put[found[0]]), before)
        subprocess.run(["bash", "-c", prepared], cwd=clone, capture_output=True, check=True)
    words = words.replace("STORE", f"store-{number}").replace("--nproc_per_node 8", "--nproc_per_node 2").replace("--open", "")
    words = words.replace("--count 50000", "--count 40")
    if words.startswith("--"):
        words = f"scripts/train.sh {words}" + ("" if "--job.name" in words else f" --job.name documented-{number}")
    environment = os.environ | {"PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    seconds = 15.0 if any(name in command for name in NOT_ENDING) else 60.0 if any(name in command for name in LONG) else most
    start = time.perf_counter()
    with subprocess.Popen(
        ["bash", "-c", f"{words} {added}"], cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output = process.communicate(timeout=seconds)[0]
            good = {0, DIFFERENCE} if " diff " in command else {0}
            verdict = "ran" if process.returncode in good else "refused" if process.returncode == 2 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            output = process.communicate()[0]
            verdict = "ran, stopped" if seconds < most else "out of time"
    of_program, launcher, _ = output.partition("Traceback")  # a launcher has one for every refusal
    if launcher and verdict != "refused":
        verdict = "failed"
    lines = [line for line in of_program.splitlines() if line.strip() and not OF_LAUNCHER.match(line)]
    said = "" if verdict.startswith("ran") or not lines else lines[-1]
    return Row(command, added, verdict, time.perf_counter() - start, said)


def table(rows: list[Row], commit: str) -> Iterator[str]:
    """Lines of the result; commit: of the clone."""
    yield f"# Commands of the README and of docs/index.md, run in a fresh clone ({date.today()})\n"
    yield ", ".join(f"{name} {version}" for name, version in (versions() | {"git_commit": commit}).items()) + "\n"
    yield "| command | shortened by | verdict | seconds |"
    yield "|---|---|---|---|"
    for row in rows:
        said = f": {row.said[:200]}".replace("|", "/") if row.said else ""
        yield f"| `{row.command}` | {f'`{row.added}`' if row.added else ''} | {row.verdict}{said} | {row.seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="regular expression: commands that it is found in")
    parser.add_argument("--output", type=Path, default=RESULT, help="table to write")
    parser.add_argument("--put", action="append", default=[], metavar="NAME=PATH", help="what stands for NAME")
    parser.add_argument("--most", type=float, default=300.0, metavar="SECONDS", help="for one command (default: 300)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place) / "clone"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        commit = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], cwd=clone, text=True).strip()
        (clone / ".venv").symlink_to(ROOT / ".venv")
        put = make_data(Path(place)) | dict(each.split("=", 1) for each in arguments.put)
        rows = []
        chosen = [command for command in documented() if re.search(arguments.only, command)]
        for number, command in enumerate(tqdm(chosen, unit="command")):
            rows.append(run(number, command, clone, put, arguments.most))
            arguments.output.write_text("\n".join(table(rows, commit)).replace(place, "...") + "\n")
    sys.exit(any(row.verdict in ("failed", "refused", "out of time") for row in rows))


if __name__ == "__main__":
    main()
