"""Hostile runs on pages, hostile sweeps, records of studies and searches, and strange surroundings."""

import json
import os
import re
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.faults.hostile_case import REFUSED, STOPPED, SURVIVED, Place, device, hostile
from tests.faults.hostile_images import EPS
from tests.faults.hostile_process import Outcome

MARKUP = "<script>alert(1)</script>"
EVIL = {
    "markup": MARKUP, "an attribute": "\"'><img src=x onerror=alert(1)>",
    "the end of a style": "</style></title></svg><script>alert(1)</script>",
    "escape sequences": "\x1b]0;x\x07\x1b[2J\x9b",
    "markdown": "|x|\n\n# y [z](javascript:alert(1)) ![](http://hostile/x) `<b>`",
    "bidirectional marks": "x\u202egnp.\u2066", "a formula": "=HYPERLINK(\"http://hostile\",1)",
    "10^5 letters": "x" * 10**5,
    "an entity": "&lt;script&gt;", "half a character": "\ud800",
    "braces": "{0.__class__} %s %(x)s ${HOME} $(hostile) `hostile`",
    "mathematics": "$\\frac{1}{0}$ $$ \\includegraphics{/etc/passwd} $\\text{x",
    "CDATA": "]]><script>alert(1)</script>",
}  # fmt: skip


def harmless(place: Place, outcome: Outcome) -> None:
    """Nothing that was written is a program, or leads to another host, or controls a terminal."""
    for path in place.outputs.rglob("*"):
        if path.suffix not in (".html", ".md", ".csv"):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            assert "<script>alert" not in text and not re.search(r"<img[^>]*onerror",
                                                                 text), f"{path.name} runs a script"  # fmt: skip
        if path.suffix == ".md":
            outside = re.sub(r"`[^`\n]*`", "", text)
            assert MARKUP not in outside and "<img src=x" not in outside, f"{path.name} holds markup"
            assert not re.search(r"(?<!\\)\[z\](?!\\)\(javascript", outside), f"{path.name} holds a link"
        if path.suffix == ".csv":
            assert not re.search(r'(^|,)"?=HYPERLINK', text, re.M), f"{path.name} holds a formula"
        found = re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        assert found is None, f"{path.name}: {text[max(0, found.start() - 40) : found.end() + 40]!r}"


def write_run(folder: Path, word: str) -> None:
    """A run in which everything that has a name is called so."""
    folder.mkdir(parents=True)
    text = json.dumps(word)
    if "\ud800" in word:
        text = '"half"'
    quoted = text.replace("\x7f", "\\u007f").replace("\x9b", "\\u009b")
    (folder / "config.toml").write_text(
        f"[job]\nname = {quoted}\n[model]\nflavor = {quoted}\n[data]\nname = {quoted}\n[debug]\nseed = 1\n"
        f"[x]\n{quoted} = {quoted}\n",
        encoding="utf-8",
    )
    points = [
        {"step": step, "loss_metrics/global_avg_loss": 1 / (step + 1), word: step,
         f"validation_metrics/{word}/loss": 0.5,  # fmt: skip
         "throughput(img/s)": 10.0 + step, "mfu(%)": 3.0, "memory/max_reserved(GiB)": 1.0, "x": word}
        for step in range(1, 30)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    summary = {"status": "completed", "step": 30, "device": word, "versions": {"torch": word, word: word},
               "reason": word}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))


PAGES = {
    "compare": ("scripts/compare.py", "{in}/0", "{in}/1", "--output", "{out}/page.html"),
    "analysis": ("optimization_analysis.py", "{in}", "--out", "{out}/analysis"),
}


def _words(place: Place, words: tuple[str, ...]) -> tuple[str, ...]:
    place.outputs.mkdir(exist_ok=True)
    return tuple(word.replace("{in}", str(place.input)).replace("{out}", str(place.outputs)) for word in words)


for _page, _command in PAGES.items():
    for _name, _word in EVIL.items():

        @hostile("page", SURVIVED, REFUSED, name=f"{_page}: names of {_name}", check=harmless)
        def _(place: Place, word: str = _word, command: tuple[str, ...] = _command) -> tuple[str, ...]:
            for number in range(2):
                write_run(place.input / str(number), word)
            return _words(place, command)


NUMBERS = {
    "1e308": 1e308, "-1e308": -1e308, "10^400": 10**400, "2^63": 1 << 63, "5e-324": 5e-324, "NaN": float("nan"),
    "infinity": float("inf"), "true": True, "text": "1", "a list": [1], "nothing": None,
}  # fmt: skip


def _numbered(place: Place, value: object, words: tuple[str, ...], steps: bool) -> tuple[str, ...]:
    for number in range(2):
        write_run(place.input / str(number), "x")
        lines = (place.input / str(number) / "metrics.jsonl").read_text().splitlines()
        points = [json.loads(line) for line in lines]
        for at, point in enumerate(points):
            for key in point:
                if key != "step":
                    point[key] = value
            if steps:
                point["step"] = 10**400 + at if value == 10**400 else (1 << 62) + at
        (place.input / str(number) / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
        summary = dict.fromkeys(("step", "progress", "images", "seconds", "peak_memory", "world_size"), value)
        (place.input / str(number) / "summary.json").write_text(json.dumps(summary | {"status": "completed"}))
    return _words(place, words)


for _page, _command in PAGES.items():
    for _name, _value in NUMBERS.items():

        @hostile("page", SURVIVED, REFUSED, name=f"{_page}: every number {_name}", check=harmless)
        def _(place: Place, value: object = _value, command: tuple[str, ...] = _command) -> tuple[str, ...]:
            return _numbered(place, value, command, steps=False)

    @hostile("page", SURVIVED, REFUSED, name=f"{_page}: steps of 10^400", check=harmless)
    def _(place: Place, command: tuple[str, ...] = _command) -> tuple[str, ...]:
        return _numbered(place, 10**400, command, steps=True)

    @hostile("page", SURVIVED, REFUSED, name=f"{_page}: steps of 2^62", check=harmless)
    def _(place: Place, command: tuple[str, ...] = _command) -> tuple[str, ...]:
        return _numbered(place, 0.5, command, steps=True)

    @hostile("page", SURVIVED, REFUSED, name=f"{_page}: samples that are PostScript, links and devices", check=harmless)
    def _(place: Place, command: tuple[str, ...] = _command) -> tuple[str, ...]:
        for number in range(2):
            write_run(place.input / str(number), "x")
            samples = place.input / str(number) / "samples"
            samples.mkdir()
            (samples / "step-00000001.png").write_bytes(EPS)
            (samples / "step-00000002.png").symlink_to(device(place, "zero"))
            (samples / "step-00000003.png").symlink_to(place.precious / "thesis.txt")
            (samples / "step-00000004.png").mkdir()
        return _words(place, command)

    @hostile("page", SURVIVED, REFUSED, name=f"{_page}: a sweep's record of markup", check=harmless)
    def _(place: Place, command: tuple[str, ...] = _command) -> tuple[str, ...]:
        for number in range(2):
            write_run(place.input / str(number), "x")
        rows = [{"cell": word, "name": word, "axes": {word: word}, "repeat": 0, "status": word, "reason": word,
                 "seconds": 1,  # fmt: skip
                 "run": word} for word in EVIL.values()]  # fmt: skip
        (place.input / "sweep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place.input / "sweep.toml").write_text("name = '<b>'\n")
        return _words(place, command)


# ---------------------------------------------------------------------- sweeps

FIXED = '[fixed]\nmodel.flavor = "debug"\ndata.name = "synthetic"\ntraining.steps = 2\n'
AXES = "[axes]\ntraining.local_batch_size = [1, 2]\n"


def sweep(name: str, text: str | bytes, *verdicts: str, before: Callable[[Place], None] | None = None,
          dry: bool = True) -> None:  # fmt: skip
    """Register a sweep's file."""

    @hostile("sweep", *(verdicts or (REFUSED,)), name=f"sweep: {name}")
    def write(place: Place) -> tuple[str, ...]:
        path = place.input / "grid.toml"
        path.write_bytes(text.replace("{place}", str(place.folder)).encode() if isinstance(text, str) else text)
        if before is not None:
            before(place)
        return ("scripts/sweep.py", str(path), "--output", str(place.outputs / "grid"),
                *(("--dry-run",) if dry else ()))  # fmt: skip


sweep("a fixed job.dump_folder", FIXED + 'job.dump_folder = "{place}/precious"\n' + AXES)
sweep("a fixed job.dump_folder, begun", FIXED + 'job.dump_folder = "{place}/precious"\n' + AXES, dry=False)
sweep("a fixed job.name", FIXED + 'job.name = "../../precious"\n' + AXES)
sweep("a fixed job.config_file", FIXED + 'job.config_file = "/dev/zero"\n' + AXES)
sweep("a fixed folder of checkpoints", FIXED + 'checkpoint.enable = true\ncheckpoint.folder = "{place}/precious"\n'
      + AXES)  # fmt: skip
sweep("dump folders as an axis", FIXED + '[axes]\njob.dump_folder = ["{place}/precious", "{place}/home"]\n')
sweep("names as an axis", FIXED + '[axes]\njob.name = ["../a", "/b"]\n')
sweep("files of configurations as an axis", FIXED + '[axes]\njob.config_file = ["/dev/zero", "/dev/stdin"]\n')
sweep("folders of checkpoints as an axis", FIXED + '[axes]\ncheckpoint.folder = ["{place}/precious", "{place}"]\n')
sweep("cells that are called alike", FIXED + '[axes]\nobjective.weighting = ["a/b", "a b", "a-b"]\n')
sweep("10^9 cells", FIXED + "[axes]\n" + "".join(f"model.dim{n} = [1, 2, 3, 4, 5, 6, 7, 8]\n" for n in range(10)))
sweep("10^9 cells of keys that there are", FIXED + "[axes]\n" + "".join(
    f"{key} = [{', '.join(map(str, range(1, 1001)))}]\n"
    for key in ("training.local_batch_size", "training.gc_freq", "debug.seed")))  # fmt: skip
sweep("an axis of 10^6 values", FIXED + "[axes]\ntraining.local_batch_size = [" + "1, " * 10**6 + "1]\n")
sweep("10^9 repeats", "repeats = 1000000000\n" + FIXED + AXES)
sweep("10^30 repeats", "repeats = 1" + "0" * 30 + "\n" + FIXED + AXES)
sweep("2^40 processes", "processes = 1099511627776\n" + FIXED + AXES)
sweep("a name that climbs", 'name = "../x"\n' + FIXED + AXES)
sweep("a name of escape sequences", 'name = "\\u001b[2J"\n' + FIXED + AXES)
sweep("a base of itself", 'base = "grid.toml"\n' + FIXED + AXES)
sweep("a base that is a device", 'base = "/dev/zero"\n' + FIXED + AXES)
sweep("a base that is a pipe", 'base = "pipe"\n' + FIXED + AXES, before=lambda place: os.mkfifo(place.input / "pipe"))
sweep("a base that is a link to itself", 'base = "loop"\n' + FIXED + AXES,
      before=lambda place: (place.input / "loop").symlink_to("loop"))  # fmt: skip
sweep("values of escape sequences", FIXED + '[axes]\nobjective.weighting = ["\\u001b[2J\\u0007", "\\n\\r"]\n')
sweep("keys of escape sequences", FIXED + '[axes]\n"\\u001b[2J\\u0007" = [1]\n')
sweep("an excluded value of escape sequences", FIXED + AXES + '[[exclude]]\n"\\u001b[2J" = "\\u0007"\n')
sweep("a value nested 10^5 times", FIXED + "[axes]\ntraining.steps = " + "[" * 10**5 + "]" * 10**5)
sweep("NaN on an axis", FIXED + "[axes]\noptimizer.lr = [nan, nan, inf]\n")
sweep("an endless time", "timeout_s = inf\n" + FIXED + AXES, REFUSED, SURVIVED)
sweep("tables in tables", FIXED + "[axes]\nmodel = {a = {b = {c = [1]}}}\n")
sweep("UTF-16", (FIXED + AXES).encode("utf-16"))
sweep("NULs", (FIXED + AXES).encode() + b"\0")
sweep("weights from a device", FIXED + 'checkpoint.initial_weights = "/dev/zero"\n' + AXES, REFUSED, SURVIVED)


def _record(text: str) -> Callable[[Place], None]:
    def write(place: Place) -> None:
        folder = place.outputs / "grid"
        folder.mkdir(parents=True)
        (folder / "sweep.toml").write_bytes((place.input / "grid.toml").read_bytes())
        (folder / "sweep.jsonl").write_text(text)

    return write


_ROW = {"cell": "batch=1", "repeat": 0, "status": "ok", "reason": "", "seconds": 1}
sweep("a record of escape sequences", FIXED + AXES, SURVIVED, REFUSED, before=_record("".join(
    json.dumps(_ROW | {"cell": f"batch={n}", "status": "\x1b[2J\x07",
                       "reason": "\x1b[2J"}) + "\n" for n in (1, 2))))  # fmt: skip
sweep("a record nested 10^5 times", FIXED + AXES, before=_record("[" * 10**5 + "\n"))
sweep("a record of cells that are lists", FIXED + AXES, before=_record(json.dumps(_ROW | {"cell": [1]}) + "\n"))
sweep("a record of a repeat of 10^5 digits", FIXED + AXES,
      before=_record('{"cell": "a", "repeat": ' + "9" * 10**5 + "}\n"))  # fmt: skip


@hostile("sweep", REFUSED, name="sweep: its record is a pipe")
def _(place: Place) -> tuple[str, ...]:
    (place.input / "grid.toml").write_text(FIXED + AXES)
    (place.outputs / "grid").mkdir(parents=True)
    os.mkfifo(place.outputs / "grid" / "sweep.jsonl")
    return ("scripts/sweep.py", str(place.input / "grid.toml"), "--output", str(place.outputs / "grid"), "--dry-run")


@hostile("sweep", REFUSED, name="sweep: its lock is a link to something of the user's")
def _(place: Place) -> tuple[str, ...]:
    (place.input / "grid.toml").write_text(FIXED + AXES + '[[exclude]]\ntraining.local_batch_size = [1, 2]\n')
    (place.outputs / "grid").mkdir(parents=True)
    (place.outputs / "grid" / ".lock").symlink_to(place.precious / "thesis.txt")
    return ("scripts/sweep.py", str(place.input / "grid.toml"), "--output", str(place.outputs / "grid"))


for _path in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/dev/ptmx", "/"):

    @hostile("sweep", REFUSED, name=f"sweep: the file is {_path}")
    def _(place: Place, path: str = _path) -> tuple[str, ...]:
        return ("scripts/sweep.py", path, "--output", str(place.outputs / "grid"), "--dry-run")


# ---------------------------------------------------------------------- surroundings


def surroundings(
    name: str, *verdicts: str, environment: dict | None = None, before: Callable | None = None,
    made: Callable[[Place], object] | None = None, **options: object,
) -> None:
    """Register surroundings in which a small run is started."""

    @hostile("surroundings", *verdicts, name=f"surroundings: {name}", environment=environment or {}, before=before,
             **options)  # fmt: skip
    def write(place: Place) -> tuple[str, ...]:
        if made is not None:
            made(place)
        return place.train("--data.name", "synthetic", "--data.shape", "[1, 8, 8]", "--sampling.enable", "true",
                           "--sampling.num_steps", 2, "--sampling.interval", 2, "--metrics.enable_tensorboard", "true",
                           "--checkpoint.enable", "true")  # fmt: skip


def _close_input() -> None:
    os.close(0)


def _private() -> None:
    os.umask(0o077)


def _nothing_allowed() -> None:
    os.umask(0o777)


def _gone() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def _read_only() -> None:
    os.chdir("/proc/self")


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))



def _small_files() -> None:
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))


surroundings("no TMPDIR", SURVIVED, environment={"TMPDIR": "{place}/nowhere"})
surroundings("TMPDIR is a file", SURVIVED, environment={"TMPDIR": "{place}/precious/thesis.txt"})
surroundings("no HOME", SURVIVED, environment={"HOME": None})
surroundings("HOME is a file", SURVIVED, environment={"HOME": "{place}/precious/thesis.txt"})
surroundings("HOME is nowhere", SURVIVED, environment={"HOME": "/nonexistent"})
surroundings("no PATH", SURVIVED, environment={"PATH": None})
surroundings("an empty environment for names", SURVIVED,
             environment={"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"})  # fmt: skip
surroundings("a rank of words", REFUSED, STOPPED, environment={"RANK": "first", "WORLD_SIZE": "\x1b[2J"})
surroundings("a rank beyond the others", REFUSED, STOPPED,
             environment={"RANK": "5", "WORLD_SIZE": "1", "LOCAL_RANK": "-1"})  # fmt: skip
surroundings("a status file that is a device", SURVIVED, REFUSED, environment={"TRAIN_STATUS_FILE": "{place}/full"},
             made=lambda place: device(place, "full"))  # fmt: skip
surroundings("a status file that is a pipe", SURVIVED, REFUSED, environment={"TRAIN_STATUS_FILE": "{place}/pipe"},
             made=lambda place: os.mkfifo(place.folder / "pipe"))  # fmt: skip
surroundings("a status file of the user's folder", SURVIVED, environment={"TRAIN_STATUS_FILE": "{place}/precious"})
surroundings("100,000 columns", SURVIVED, environment={"COLUMNS": "100000", "LINES": "-1"})
surroundings("no input", SURVIVED, before=_close_input)
surroundings("umask 077", SURVIVED, before=_private)
surroundings("umask 777", SURVIVED, REFUSED, STOPPED, before=_nothing_allowed)
surroundings("the current folder is gone", SURVIVED, REFUSED, before=_gone)
surroundings("the current folder cannot be written", SURVIVED, before=_read_only)
surroundings("64 open files", SURVIVED, REFUSED, STOPPED, before=_few_files)
surroundings("files of 4 KiB at most", SURVIVED, REFUSED, STOPPED, before=_small_files)
surroundings("600 MB of address space", SURVIVED, REFUSED, STOPPED, more_mapped=600 << 20)


