"""Hostile run folders: what a start of the same command, and the tools, meet in them."""

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.faults.hostile_case import REFUSED, STOPPED, SURVIVED, Place, device, hostile
from tests.faults.hostile_process import Outcome

RUN = (
    "--data.name", "synthetic", "--data.shape", "[1, 8, 8]", "--data.num_classes", 3, "--training.steps", 6,
    "--training.local_batch_size", 2, "--checkpoint.enable", "true", "--checkpoint.interval", 2,
    "--checkpoint.keep_latest_k", 3,
)  # fmt: skip
STEP = "checkpoint/step-00000004"


def interrupted_run(place: Place) -> tuple[str, ...]:
    """A run that was cut off after step 4, with checkpoints of steps 2 and 4; returns the command that resumes it."""
    words = place.train(*RUN)
    place.fill_outputs(words, _cut_off)
    return words


def _cut_off(outputs: Path) -> None:
    shutil.rmtree(outputs / "run" / "checkpoint" / "step-00000006")
    summary = json.loads((outputs / "run" / "summary.json").read_bytes())
    (outputs / "run" / "summary.json").write_text(json.dumps(summary | {"status": "interrupted", "step": 4}))
    lines = (outputs / "run" / "metrics.jsonl").read_text().splitlines()[:4]
    (outputs / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def run_folder(name: str, *verdicts: str, long: bool = False, check: Callable | None = None,
               **options: object) -> Callable:  # fmt: skip
    """Register what is changed in an interrupted run before it is resumed."""

    def register(make: Callable[[Path, Place], None]) -> Callable:
        @hostile("run folder", *(verdicts or (REFUSED, SURVIVED)), name=f"run: {name}", long=long, check=check,
                 **options)  # fmt: skip
        def write(place: Place) -> tuple[str, ...]:
            words = interrupted_run(place)
            make(place.run, place)
            return words

        return make

    return register


def _in_place(name: str, make: Callable[[Path, Place], None]) -> Callable[[Path, Place], None]:
    def change(run: Path, place: Place) -> None:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        make(path, place)

    return change


def _link_to_thesis(path: Path, place: Place) -> None:
    path.symlink_to(place.precious / "thesis.txt")


def _link_to_folder(path: Path, place: Place) -> None:
    path.symlink_to(place.precious)


def _hole(path: Path, place: Place) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


# Everything that a run writes, with something of the user's in its place: it must stay as it is.
for _name in ("metrics.jsonl", "config.toml", "summary.json", "status.json", ".lock", "corrupt_images.txt"):
    run_folder(f"{_name} is a link to something of the user's")(_in_place(_name, _link_to_thesis))
    # What stands in the summary's place is met at the end, tried again for some seconds, and said.
    _at_the_end = {"long": True, "seconds": 60.0} if _name == "summary.json" else {}
    _verdicts = (REFUSED, SURVIVED, *[STOPPED] * (_name == "summary.json"))
    run_folder(f"{_name} is a pipe", *_verdicts, **_at_the_end)(_in_place(_name, lambda path, place: os.mkfifo(path)))
    run_folder(f"{_name} is a folder", *_verdicts, **_at_the_end)(_in_place(_name, lambda path, place: path.mkdir()))
for _name in ("checkpoint", "samples", "gns", "profile", "tb", "faults"):
    run_folder(f"{_name} is a link to a folder of the user's", adds=("precious",))(_in_place(_name, _link_to_folder))
for _name in ("config.toml", "summary.json", "metrics.jsonl"):
    # Metrics are read through once, however many they are.
    run_folder(f"{_name} of 3 GiB", **({"long": True, "seconds": 30.0} if _name == "metrics.jsonl" else {}))(
        _in_place(_name, _hole)
    )
    run_folder(f"{_name} is a link to /dev/zero")(_in_place(_name, lambda path,
                                                            place: path.symlink_to(device(place, "zero"))))  # fmt: skip
for _name in ("manifest.json", "state.json", "shard-00001.safetensors"):
    run_folder(f"{_name} of the newest checkpoint is a pipe", SURVIVED)(
        _in_place(f"{STEP}/{_name}", lambda path, place: os.mkfifo(path))
    )
    run_folder(f"{_name} of the newest checkpoint is a link to /dev/zero", SURVIVED)(
        _in_place(f"{STEP}/{_name}", lambda path, place: path.symlink_to(device(place, "zero")))
    )


@run_folder("metrics.jsonl is a link to metrics of the user's")
def _(run: Path, place: Place) -> None:
    _in_place("metrics.jsonl", lambda path, place: path.symlink_to(place.precious / "metrics.jsonl"))(run, place)


@run_folder("the newest checkpoint is a link to a folder of the user's", SURVIVED)
def _(run: Path, place: Place) -> None:
    (run / "checkpoint" / "step-00000005").symlink_to(place.precious / "step-00000001")


@run_folder("the oldest checkpoint is a link to a folder of the user's", SURVIVED)
def _(run: Path, place: Place) -> None:
    (run / "checkpoint" / "step-00000001").symlink_to(place.precious / "step-00000001")


@run_folder("unfinished checkpoints that are links to folders of the user's", SURVIVED)
def _(run: Path, place: Place) -> None:
    for name in (".step-00000004.tmp", ".step-00000006-unfinished", ".tmp", "step-00000006.tmp", ".hidden"):
        (run / "checkpoint" / name).symlink_to(place.precious)


def _kept(place: Place, outcome: Outcome) -> None:
    assert (place.run / "checkpoint" / ".git" / "HEAD").read_text() == "mine\n"
    assert (place.run / "checkpoint" / "notes" / "x").read_text() == "mine\n"


@run_folder("checkpoints among folders of the user's", SURVIVED, check=_kept)
def _(run: Path, place: Place) -> None:
    for name in (".git/HEAD", "notes/x", "step-000000040/x", "step-x/x", "STEP-00000002/x"):
        (run / "checkpoint" / name).parent.mkdir(parents=True)
        (run / "checkpoint" / name).write_text("mine\n")


@run_folder("a checkpoint of step 10^30", SURVIVED)
def _(run: Path, place: Place) -> None:
    shutil.copytree(run / STEP, run / "checkpoint" / f"step-{10**30}")


@run_folder("a checkpoint of step -4", SURVIVED)
def _(run: Path, place: Place) -> None:
    shutil.copytree(run / STEP, run / "checkpoint" / "step--0000004")


@run_folder("a checkpoint of digits of another script", SURVIVED)
def _(run: Path, place: Place) -> None:
    shutil.copytree(run / STEP, run / "checkpoint" / "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669")


@run_folder("3,000 checkpoints that are empty", SURVIVED, long=True)
def _(run: Path, place: Place) -> None:
    for number in range(100, 3100):
        (run / "checkpoint" / f"step-{number:08d}").mkdir()


METRICS = {
    "a step of 10^300": '{"step": 1' + "0" * 300 + "}", "a step of 10^5 digits": '{"step": ' + "9" * 10**5 + "}",
    "a step of 1e308": '{"step": 1e308, "loss": 1}', "a step of true": '{"step": true}', "a step of -5": '{"step": -5}',
    "lists nested 10^5 times": "[" * 10**5, "a line of 60 MB": '{"step": 1, "x": "' + "x" * 60_000_000 + '"}',
    "escape sequences": '{"step": 3, "\\u001b[2J": "\\u0007"}',
    "lines of all kinds": '{"step": 3}\u2028{"step": 4}\u0085{"step": 9}',
    "a step twice": '{"step": 4}\n{"step": 4}', "10^5 steps to come": "\n".join(f'{{"step": {n}}}'
                                                                                for n in range(5, 10**5)),  # fmt: skip
}  # fmt: skip
for _name, _text in METRICS.items():

    @run_folder(f"metrics of {_name}", SURVIVED)
    def _(run: Path, place: Place, text: str = _text) -> None:
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(text + "\n")


def state(name: str, edit: Callable[[dict], None]) -> None:
    """Register a state.json whose checksum fits: the checkpoint before, or a refusal, or a legal value."""

    @run_folder(f"state with {name}", SURVIVED, REFUSED, STOPPED)
    def change(run: Path, place: Place) -> None:
        content = json.loads((run / STEP / "state.json").read_bytes())
        edit(content)
        _replace(run / STEP, "state.json", json.dumps(content).encode())


def _replace(checkpoint: Path, name: str, content: bytes) -> None:
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def _everywhere(value: object) -> Callable[[dict], None]:
    def edit(table: dict) -> None:
        for key in table:
            if isinstance(table[key], dict):
                edit(table[key])
            elif isinstance(table[key], int | float):
                table[key] = value

    return edit


for _value in (-1, 1 << 62, 1 << 200, float("nan"), 1e308, "\x1b[2J", None):
    state(f"all numbers {_value!r}"[:60], _everywhere(_value))
state("an unknown key of escape sequences", lambda content: content.update({"\x1b[2J\x07": 1}))
state("a step to come", lambda content: content.update(step=5_000_000))


@run_folder("weights of NaN, checksums right", REFUSED, STOPPED, SURVIVED)
def _(run: Path, place: Place) -> None:
    name = "shard-00001.safetensors"
    with safe_open(run / STEP / name, framework="pt") as file:
        metadata = file.metadata()
    tensors = {key: value * float("nan") if value.is_floating_point() else value for key,
               value in load_file(run / STEP / name).items()}  # fmt: skip
    save_file(tensors, run / STEP / name, metadata)
    _replace(run / STEP, name, (run / STEP / name).read_bytes())


# ---------------------------------------------------------------------- tools on run folders


def tool(name: str, *words: str, verdicts: tuple[str, ...] = (REFUSED, SURVIVED, STOPPED),
         long: bool = False) -> Callable:  # fmt: skip
    """Register a tool on a changed run; {run} and {out} stand for folders."""

    def register(make: Callable[[Path, Place], Path | None]) -> Callable:
        @hostile("tool on a run", *verdicts, name=f"{words[0].rpartition('/')[2]} {name}", long=long)
        def write(place: Place) -> tuple[str, ...]:
            interrupted_run(place)
            run = make(place.run, place) or place.run
            return tuple(word.replace("{run}", str(run)).replace("{out}", str(place.outputs / "tool"))
                         for word in words)  # fmt: skip

        return make

    return register


def _renamed(run: Path, place: Place) -> Path:
    return run.rename(run.with_name("\x1b[2J\x07x\ny\u202e"))


for _words in (
    ("scripts/checkpoint.py", "list", "{run}"), ("scripts/checkpoint.py", "verify", "{run}"),
    ("scripts/checkpoint.py", "diff", "{run}", "{run}"), ("scripts/compare.py", "{run}", "--output", "{out}.html"),
    ("optimization_analysis.py", "{run}", "--out", "{out}"),
    ("scripts/checkpoint.py", "export", "{run}", "--format", "safetensors", "--output", "{out}.safetensors"),
    ("scripts/study.py", "loss_curve", "{run}"), ("scripts/critical_batch.py", "{run}", "--factors", "nan"),
    ("scripts/sample.py", "{run}", "--images-per-class", "1", "--num-steps", "1"),
):  # fmt: skip
    tool(f"{_words[1]} of a folder of escape sequences", *_words, verdicts=(SURVIVED, REFUSED, STOPPED),
         long=_words[0] in ("scripts/sample.py", "scripts/study.py"))(_renamed)  # fmt: skip


def _damaged_names(run: Path, place: Place) -> None:
    manifest = json.loads((run / STEP / "manifest.json").read_bytes())
    manifest["files"]["\x1b[2J\x07"] = {"size": 1, "sha256": "0" * 64}
    (run / STEP / "manifest.json").write_text(json.dumps(manifest))
    whole = (run / "checkpoint/step-00000002" / "shard-00001.safetensors").read_bytes()
    header = json.dumps({"\x1b[2J\x07\n": {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 4]}}).encode()
    _replace(run / "checkpoint/step-00000002", "shard-00001.safetensors", struct.pack("<Q", len(header)) + header
             + whole[:4])  # fmt: skip


for _command in ("list", "verify"):
    tool(f"{_command}: names of escape sequences in a manifest", "scripts/checkpoint.py", _command,
         "{run}")(_damaged_names)  # fmt: skip


for _words in (("scripts/compare.py", "{run}", "--output", "{out}.html"),
               ("optimization_analysis.py", "{run}", "--out", "{out}")):  # fmt: skip
    tool("with metrics from a pipe", *_words)(
        lambda run, place: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")) and None
    )
    tool("with metrics of 3 GiB", *_words)(lambda run, place: _hole(run / "metrics.jsonl", place))
    tool("with samples from a pipe", *_words)(
        lambda run, place: ((run / "samples").mkdir(exist_ok=True),
                            os.mkfifo(run / "samples" / "step-00000004.png")) and None  # fmt: skip
    )
