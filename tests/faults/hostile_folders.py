"""Hostile folders of images, lists of classes and configurations."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.encoded_images import image_bytes
from tests.faults.hostile_case import REFUSED, SURVIVED, Place, hostile
from tests.faults.hostile_images import FOLDER, SMALL, folder_of, named, write_good

# ---------------------------------------------------------------------- folders of images


def folder(name: str, *verdicts: str, long: bool = False, more: tuple = (), check: Callable | None = None) -> Callable:
    """Register what changes a folder of two classes of good images."""

    def register(make: Callable[[Path, Place], None]) -> Callable:
        @hostile("folder", *(verdicts or (REFUSED, SURVIVED)), name=f"folder: {name}", long=long, check=check)
        def write(place: Place) -> tuple[str, ...]:
            write_good(place)
            make(place.input, place)
            return folder_of(place, *SMALL, *more)

        return make

    return register


def _nested(depth: int) -> Callable[[Path, Place], None]:
    def make(root: Path, place: Place) -> None:
        here = os.open(root / "a", os.O_PATH)
        for _ in range(depth):
            os.mkdir("deep", dir_fd=here)
            below = os.open("deep", os.O_PATH, dir_fd=here)
            os.close(here)
            here = below
        descriptor = os.open("x.png", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here)
        os.write(descriptor, image_bytes(1))
        os.close(descriptor)
        os.close(here)

    return make


def _bad(name: bytes) -> Callable[[Path, Place], None]:
    return lambda root, place: Path(os.fsdecode(os.fsencode(root) + b"/a/" + name)).write_bytes(b"no image")


def _class(name: bytes, *files: bytes) -> Callable[[Path, Place], None]:
    def make(root: Path, place: Place) -> None:
        os.mkdir(os.fsencode(root) + b"/" + name)
        for each in files:
            Path(os.fsdecode(os.fsencode(root) + b"/" + name + b"/" + each)).write_bytes(image_bytes(3))

    return make


folder("a bad image named by a newline and a lie", SURVIVED, check=named("lie"))(_bad(b"x\n17:00:00 completed lie.png"))
folder("a bad image named by escape sequences", SURVIVED,
       check=named("evil"))(_bad(b"\x1b]52;c;aG9zdGlsZQ==\x07evil.png"))  # fmt: skip
folder("a bad image named by a carriage return", SURVIVED, check=named("evil"))(_bad(b"x\revil\x08\x7f.png"))
folder("a bad image named by C1 controls", SURVIVED, check=named("evil"))(_bad("x\u009b2Jevil\u0085.png".encode()))
folder("a bad image named by bidirectional marks", SURVIVED,
       check=named("evil"))(_bad("x\u202egnp.evil\u2069.png".encode()))  # fmt: skip
folder("a bad image named by no UTF-8", SURVIVED, check=named("evil"))(_bad(b"x\xff\xc0evil.png"))
folder("a bad image named by a tab and markup", SURVIVED, check=named("evil"))(_bad(b"a\tb <b>evil&amp;.png"))
folder("a bad image of a name of 255 bytes", SURVIVED, check=named("nnnnn"))(_bad(b"n" * 251 + b".png"))
folder("a class named by escape sequences", SURVIVED)(_class(b"\x1b[2J\x07", b"x.png"))
folder("a class named by a newline", SURVIVED)(_class(b"x\ny", b"x.png"))
folder("a class named by no UTF-8", SURVIVED)(_class(b"\xff\xfe", b"x.png"))
folder("a class of escape sequences without images", REFUSED)(_class(b"\x1b[2J\x07\r\x08"))
folder("classes that differ in case", SURVIVED)(_class(b"A", b"x.png", b"X.png", b"X.PNG"))
folder("5,000 folders in one another", long=True)(_nested(5000))
folder("700 folders in one another, a path of 4,200 bytes")(_nested(840))
folder("links that go round", SURVIVED)(lambda root, place: (root / "a" / "round").symlink_to(root))
folder("a class that is a link to itself")(lambda root, place: (root / "c").symlink_to("c"))
folder("a class that is a link to /proc", REFUSED, SURVIVED)(lambda root, place: (root / "c").symlink_to("/proc/self"))
folder("a class that is a pipe", SURVIVED)(lambda root, place: os.mkfifo(root / "c"))
folder("a class that is an image's name", SURVIVED)(_class(b"c.png", b"x.png"))
folder("60 corrupt images of 72", REFUSED, SURVIVED, "stopped at work")(
    lambda root, place: [(root / "a" / f"x{number}.png").write_bytes(b"no image") for number in range(60)]
)
folder("3,000 classes", SURVIVED, long=True)(
    lambda root, place: [_class(b"c%d" % n, b"x.png")(root, place) for n in range(3000)]
)


def path_given(name: str, path: str, *more: object) -> None:
    """Register a value of data.path."""

    @hostile("folder", REFUSED, name=f"folder: {name}")
    def write(place: Place) -> tuple[str, ...]:
        return place.train(*FOLDER, *SMALL, "--data.path", path.format(place=place.input), *more)


path_given("/dev/zero as the data", "/dev/zero")
path_given("a NUL in the data's path", "{place}/a\0b")
path_given("a path of 10^5 letters", "{place}/" + "x" * 10**5)
path_given("a path of escape sequences", "{place}/\x1b[2J\x07\n\r\u202e")
path_given("a path of half a character", "{place}/\udcff\udcfe")
path_given("a home that is not there", "~nobody-hostile/x")
path_given("held-out images in /dev/zero", "{place}", "--data.validation_path", "/dev/zero")


# ---------------------------------------------------------------------- lists of classes


def classes(name: str, make: Callable[[Path], str | None], *verdicts: str) -> None:
    """Register a data.classes_file: what `make` wrote to the path, or the path that it returns."""

    @hostile("list of classes", *(verdicts or (REFUSED,)), name=f"classes: {name}")
    def write(place: Place) -> tuple[str, ...]:
        write_good(place)
        given = make(place.folder / "classes.txt")
        chosen = given if isinstance(given, str) else place.folder / "classes.txt"
        return folder_of(place, *SMALL, "--data.classes_file", chosen)


def _hole(path: Path, size: int = 3 << 30) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


for _path in ("/dev/zero", "/dev/stdin", "/dev/urandom", "/dev/full", "/dev/ptmx", "/proc/self/mem", "/dev/tty"):
    classes(_path, lambda path, given=_path: given)
classes("a pipe", lambda path: os.mkfifo(path))
classes("a folder", lambda path: path.mkdir())
classes("a link to itself", lambda path: path.symlink_to("classes.txt"))
classes("a hole of 3 GiB", _hole)
classes("a line of 60 MB", lambda path: path.write_text("a " + "x" * 60_000_000 + "\nb\n") and None, REFUSED, SURVIVED)
classes("10^6 classes", lambda path: path.write_text("a\nb\n" + "".join(f"c{n}\n" for n in range(10**6))) and None,
        REFUSED, SURVIVED)  # fmt: skip
classes("UTF-16", lambda path: path.write_bytes("a\nb\n".encode("utf-16")) and None)
classes("a byte order mark", lambda path: path.write_bytes(b"\xef\xbb\xbfa\nb\n") and None, REFUSED, SURVIVED)
classes("NULs", lambda path: path.write_bytes(b"a\0\nb\0\n") and None)
classes("escape sequences twice", lambda path: path.write_bytes(b"a\nb\n\x1b[2J\x07 x\n\x1b[2J\x07 y\n") and None)
classes("names of escape sequences", lambda path: path.write_bytes(b"a \x1b[2J\nb \x07<script>alert(1)</script>\n")
        and None,  # fmt: skip
        REFUSED, SURVIVED)  # fmt: skip
classes("line ends of all kinds", lambda path: path.write_bytes("a\u2028b\u0085c\x0cd\n".encode()) and None, REFUSED,
        SURVIVED)  # fmt: skip


# ---------------------------------------------------------------------- configurations


def configuration(name: str, text: str | bytes, *verdicts: str, lines: int = 3) -> None:
    """Register a TOML file; {small} stands for the small configuration's text."""

    @hostile("configuration", *(verdicts or (REFUSED,)), name=f"configuration: {name}", lines=lines)
    def write(place: Place) -> tuple[str, ...]:
        content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        (place.input / "x.toml").write_bytes(content)
        return ("train.py", "--job.config_file", str(place.input / "x.toml"), "--job.dump_folder", str(place.outputs),
                "--check-only")  # fmt: skip


def flags(name: str, *words: str, verdicts: tuple[str, ...] = (REFUSED,), run: bool = False,
          **options: object) -> None:
    """Register a command line; run: not only checked."""

    @hostile("configuration", *verdicts, name=f"command line: {name}", **options)
    def write(place: Place) -> tuple[str, ...]:
        given = [word.replace("{place}", str(place.folder)) for word in words]
        return (place.train if run else place.check)("--data.name", "synthetic", *given)


configuration("a whole number of 10^6 digits", "[training]\nsteps = " + "9" * 10**6)
configuration("a whole number of 4,000 digits", "[training]\nsteps = " + "9" * 4000)
configuration("a hexadecimal of 10^6 digits", "[debug]\nseed = 0x" + "f" * 10**6)
configuration("NaN and infinities", "[training]\nmax_norm = nan\nclip_value = inf\n[optimizer]\nlr = -inf\n")
configuration("a list nested 10^5 times", "[model]\npatch_size = " + "[" * 10**5 + "]" * 10**5)
configuration("a table nested 10^4 times", "[" + ".".join(["a"] * 10**4) + "]\nx = 1\n")
configuration("a key of 10^4 parts", ".".join(["a"] * 10**4) + " = 1\n")
configuration("inline tables nested 10^4 times", "x = " + "{a = " * 10**4 + "1" + "}" * 10**4)
configuration("a text of 10 MB", '[job]\nname = "' + "x" * 10**7 + '"\n')
configuration("a key of 10 MB", "x" * 10**7 + " = 1\n")
configuration("10^5 unknown keys", "".join(f"k{n} = 1\n" for n in range(10**5)), lines=21)
configuration("NULs", b"[training]\nsteps = 2\0\n")
configuration("an escaped NUL in a path", '[data]\nname = "image_folder"\npath = "a\\u0000b"\n')
configuration("bidirectional marks", '[training]\n# \u202e} 2 = spets\nsteps = "\u2066\u202e"\n')
configuration("escape sequences as a key", '[training]\n"\\u001b[2J\\u0007" = 1\n')
configuration("escape sequences as a section", '["\\u001b[2J\\n"]\nx = 1\n')
configuration("escape sequences as a value", '[data]\nname = "\\u001b[2J\\u0007\\r\\n17:00 completed"\n')
configuration("UTF-16", "[training]\nsteps = 2\n".encode("utf-16"))
configuration("a byte order mark", b"\xef\xbb\xbf[training]\nsteps = 2\n", REFUSED, SURVIVED)
configuration("no UTF-8", b"[training]\nsteps = 2 # \xff\n")
configuration("dates", "[training]\nsteps = 1979-05-27T07:32:00Z\n[optimizer]\nlr = 07:32:00\n")
configuration("tracks of an average 10^4 times", "[[ema.tracks]]\nname = 'a'\n" * 10**4, lines=21)
configuration("sections as values", 'training = "x"\nmodel = [1]\ndata = 7\n')
configuration("a name that climbs", '[job]\nname = "../../precious"\n')
configuration("a name of 300 letters", '[job]\nname = "' + "n" * 300 + '"\n', REFUSED, SURVIVED)
configuration("a name of escape sequences", '[job]\nname = "\\u001b[2Jx\\u0007"\n')
configuration("a name of bidirectional marks", '[job]\nname = "x\u202egnp.y"\n')
configuration("a dimension of 2^40", '[model]\nflavor = "debug"\ndim = 1099511627776\n[data]\nname = "synthetic"\n')
configuration("images of 2^31 pixels a side",
              '[data]\nname = "image_folder"\npath = "/nowhere"\nimage_size = 2147483648\n')  # fmt: skip
configuration("a shape of 10^18 numbers", '[data]\nname = "synthetic"\nshape = [1000000, 1000000, 1000000]\n')
configuration("a shape that overflows", '[data]\nname = "synthetic"\nshape = [4611686018427387904, 8, 8]\n')
configuration("2^40 classes", '[data]\nname = "synthetic"\nnum_classes = 1099511627776\n')
configuration("2^40 loss bins", '[data]\nname = "synthetic"\n[metrics]\nloss_bins = 1099511627776\n')
configuration("2^62 steps", '[data]\nname = "synthetic"\n[training]\nsteps = 4611686018427387904\n', REFUSED, SURVIVED)
configuration("2^62 images a step", '[data]\nname = "synthetic"\n[training]\nlocal_batch_size = 4611686018427387904\n')
configuration("2^40 layers", '[model]\nflavor = "debug"\nnum_layers = 1099511627776\n[data]\nname = "synthetic"\n')
configuration("100,000 loader processes", '[data]\nname = "synthetic"\nnum_workers = 100000\n')

for _path in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/dev/ptmx", "/", "/dev/full"):
    _words = ("train.py", "--job.config_file", _path, "--check-only")

    @hostile("configuration", REFUSED, name=f"configuration file {_path}")
    def _(place: Place, words: tuple[str, ...] = _words) -> tuple[str, ...]:
        return words


@hostile("configuration", REFUSED, name="configuration file: a pipe")
def _(place: Place) -> tuple[str, ...]:
    os.mkfifo(place.input / "x.toml")
    return ("train.py", "--job.config_file", str(place.input / "x.toml"), "--check-only")


@hostile("configuration", REFUSED, name="configuration file: a hole of 3 GiB")
def _(place: Place) -> tuple[str, ...]:
    _hole(place.input / "x.toml")
    return ("train.py", "--job.config_file", str(place.input / "x.toml"), "--check-only")


flags("JSON nested 10^4 times", "--ema.tracks", "[" * 10**4 + "]" * 10**4)
flags("JSON with the same key twice", "--ema.tracks", '[{"name": "a", "name": "../b"}]')
flags("a track named by a path", "--ema.tracks", '[{"name": "../../precious/x"}]', verdicts=(REFUSED, SURVIVED),
      run=True)  # fmt: skip
flags("a track named by escape sequences", "--ema.tracks", '[{"name": "\\u001b[2J"}]')
flags("a number of 10^5 digits", "--training.steps", "9" * 10**5)
flags("1e400", "--optimizer.lr", "1e400")
flags("digits of another script", "--training.steps", "\u0663\u0664", verdicts=(REFUSED, SURVIVED))
flags("underscored digits", "--training.local_batch_size", "1_0", verdicts=(REFUSED, SURVIVED))
flags("an option of escape sequences", "--training.\x1b[2J\x07", "1")
flags("a word of escape sequences", "\x1b[2J\x07\n")
flags("a dump folder that is a device", "--job.dump_folder", "/dev/null", run=True)
flags("a dump folder in a file", "--job.dump_folder", "{place}/precious/thesis.txt/x", run=True)
flags("a dump folder in /proc", "--job.dump_folder", "/proc/self/x", run=True)
flags("a dump folder of 5,000 letters", "--job.dump_folder", "{place}/outputs/" + "x" * 5000, run=True)
flags("a dump folder of escape sequences", "--job.dump_folder", "/dev/null/\x1b[2J\x07", run=True)
flags("a name of NULs", "--job.name", "a\0b", run=True)
flags("checkpoints in a device", "--checkpoint.enable", "true", "--checkpoint.folder", "/dev/null/x", run=True)
flags("checkpoints in another's folder", "--checkpoint.enable", "true", "--checkpoint.folder", "{place}/precious",
      run=True,  # fmt: skip
      verdicts=(REFUSED, SURVIVED), adds=("precious",))  # fmt: skip
flags("weights from a device", "--checkpoint.initial_weights", "/dev/zero", run=True)
flags("weights from a pipe by name", "--checkpoint.initial_weights", "/dev/stdin", run=True)
flags("shape of 10^18 numbers, run", "--data.shape", "[1000000, 1000000, 1000000]", run=True)
flags("a dimension of 2^40, run", "--model.dim", str(1 << 40), run=True)
flags("2^31 classes, run", "--data.num_classes", str(1 << 31), run=True, verdicts=(REFUSED, "stopped at work"))
flags("images of 2^20 pixels a side, run", "--data.shape", "[3, 1048576, 1048576]", run=True,
      verdicts=(REFUSED, "stopped at work"))  # fmt: skip
