"""Fetch public autoencoders and latents from the Hugging Face hub: scripts/download.py NAME...

--list shows the names. Each goes to a separate folder, downloads/NAME, with a source.json that names its commit. Every
file is compared with the hub's checksum, and gets its name only when they agree; an interrupted download resumes. Needs
the package huggingface_hub (pip install '.[hub]').
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan.errors import first_line
from torchtitan.files.durable import make_folder, replace_file, sync
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.removal import remove_folder
from torchtitan.processes.command_line import OneLineParser, run_program

CHUNK = 8 << 20  # bytes hashed at once
UNFINISHED = ".unfinished"
PARTIAL = re.compile(r".+\.[0-9a-f]{16}")
SOURCE_FILE = "source.json"


@dataclass(frozen=True)
class Piece:
    """Files of one repository on the hub.

    Attributes:
        repository: owner/name.
        files: of the repository.
        what: description with size.
        kind: of repository.
        revision: the commit that is fetched; "main" is the newest.
        sha256: of files with known content; the hub must agree.
    """

    repository: str
    files: tuple[str, ...]
    what: str
    kind: str = "model"
    revision: str = "main"
    sha256: tuple[tuple[str, str], ...] = ()

    def command(self, folder: Path, revision: str) -> str:
        """Command that fetches the same files by hand."""
        options = "" if self.kind == "model" else f" --repo-type {self.kind}"
        options += "" if revision == "main" else f" --revision {revision}"
        return f"hf download {self.repository} {' '.join(self.files)}{options} --local-dir {folder}"


JIT = ("encoder.jit", "decoder.jit")
VAE_WEIGHTS = "diffusion_pytorch_model.safetensors"
VAE = ("config.json", VAE_WEIGHTS)
PIECES = {
    "cosmos-ci8x8": Piece("nvidia/Cosmos-0.1-Tokenizer-CI8x8", JIT, "Cosmos image tokenizer, 8x, 16 channels"),
    "cosmos-ci16x16": Piece("nvidia/Cosmos-0.1-Tokenizer-CI16x16", JIT, "Cosmos image tokenizer, 16x, 16 channels"),
    "sd-vae-ft-ema": Piece(
        "stabilityai/sd-vae-ft-ema", VAE, "VAE of Stable Diffusion, that of DiT; 8x, 4 channels, 335 MB",
        revision="f04b2c4b98319346dad8c65879f680b1997b204a",
    ),
    "sd-vae-ft-mse": Piece(
        "stabilityai/sd-vae-ft-mse", VAE, "VAE of Stable Diffusion, smoother; 8x, 4 channels, 335 MB",
        revision="31f26fdeee1355a5c34592e401dd41e45d25a493",
        sha256=((VAE_WEIGHTS, "a1d993488569e928462932c8c38a0760b874d166399b14414135bd9c42df5815"),),
    ),
    "imagenet-ci8x8": Piece(
        "fal/cosmos-imagenet", ("imagenet_ci8x8.safetensors", "imagenet_ci8x8_val.safetensors"),
        "ImageNet at 256 x 256 as Cosmos CI8x8 latents, 8 bits, 21 GB", kind="dataset",
    ),
}  # fmt: skip


class DownloadError(Exception):
    """Piece that cannot be downloaded; one line: the cause and the remedy."""


@dataclass(frozen=True)
class HubFile:
    """File on the hub's record: its size in bytes, and SHA-256 (large files) or git's SHA-1."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    if arguments.list:
        print(table())
        return 0
    try:
        for name in arguments.names:
            fetch(name, arguments.output / name, arguments.revision)
    except DownloadError as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        return 130
    else:
        return 0
    return 2


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="names of the downloads")
    add("--list", action="store_true", help="show the names, and stop")
    add("--output", type=Path, default=Path("downloads"), help="parent folder (default: downloads)")
    add("--revision", help="commit, tag or branch of the repository (default: the one of --list)")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.names if name not in PIECES]
    if unknown:
        parser.error(f"nothing is called {unknown[0]!r} (there are {', '.join(PIECES)})")
    if not arguments.names and not arguments.list:
        parser.error(f"no name given (there are {', '.join(PIECES)})")
    if arguments.revision and len(arguments.names) > 1:
        parser.error("--revision: is of one repository (fetch one at a time)")
    return arguments


def table() -> str:
    lines = []
    for name, piece in PIECES.items():
        commit = "the newest commit" if piece.revision == "main" else f"commit {piece.revision[:12]}"
        lines += [f"{name:<16} {piece.what}", f"{'':<16} {piece.repository}, {commit}: {', '.join(piece.files)}"]
    return "\n".join(lines)


def fetch(name: str, folder: Path, revision: str | None) -> None:
    """Fetch a piece's files to a folder, verified. Raises DownloadError."""
    piece = PIECES[name]
    revision = revision or piece.revision
    try:
        refuse_foreign_file(folder / SOURCE_FILE, b'{\n "repository": ')
        commit, files = on_record(piece, revision)
        for file in files:
            fetch_file(piece, file, folder, commit)
        note_source(folder, piece, commit, files)
    except OSError as error:
        reason = first_line(error)
        advice = f"by hand, where there is a network: {piece.command(folder, revision)}"
        raise DownloadError(f"{name}: cannot be fetched: {reason} ({advice})") from error
    if left := remove_folder(folder / UNFINISHED, lambda name: PARTIAL.fullmatch(name) is not None):
        print(f"{left[0]}: is not of this download and was left there", file=sys.stderr)
    print(f"{folder}: {', '.join(file.name for file in files)} of {piece.repository} at {commit[:12]}")


def on_record(piece: Piece, revision: str) -> tuple[str, list[HubFile]]:
    """Look up the commit of a revision, and the hub's record of the piece's files in it."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise DownloadError("huggingface_hub is needed, and is not installed (pip install '.[hub]')") from error
    with hub_errors_as_os_errors():
        info = HfApi().repo_info(piece.repository, repo_type=piece.kind, revision=revision, files_metadata=True)
    entries = {entry.rfilename: entry for entry in info.siblings or []}
    files = []
    for name in piece.files:
        if name not in entries:
            raise DownloadError(f"{piece.repository}: has no {name} at {revision} (choose another --revision)")
        entry = entries[name]
        files.append(HubFile(name, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id))
    for name, sha256 in piece.sha256:
        recorded = next(file.sha256 for file in files if file.name == name)
        if revision == piece.revision and recorded != sha256:
            raise DownloadError(f"{piece.repository}: {name} has been replaced: SHA-256 {recorded}, not {sha256}")
    return info.sha, files


def fetch_file(piece: Piece, file: HubFile, folder: Path, commit: str) -> None:
    """Fetch one file to its place; an existing file with the same content stays."""
    target = folder / file.name
    # Named after its content: a partial file of another commit is not resumed.
    partial = folder / UNFINISHED / f"{file.name}.{(file.sha256 or file.git_sha1 or '')[:16]}"
    if target.exists():
        if differs(target, file):
            raise DownloadError(f"{target}: is another file than that of {piece.repository} (move it away)")
        return
    make_folder(partial.parent)
    if any(path.is_symlink() for path in (partial.parent, partial)) or partial.exists() and not partial.is_file():
        raise DownloadError(f"{partial}: a link or folder is in the way of the download (move it away)")
    needed = file.size - (partial.stat().st_size if partial.exists() else 0)
    room = shutil.disk_usage(partial.parent).free
    if needed > room:
        raise DownloadError(f"{folder}: {file.name} needs {needed / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free")
    receive(piece, file, commit, partial)
    if problem := differs(partial, file):
        partial.unlink()
        raise DownloadError(f"{file.name} of {piece.repository}: arrived damaged: {problem} (try again)")
    sync(partial)
    os.replace(partial, target)
    sync(folder)


def receive(piece: Piece, file: HubFile, commit: str, partial: Path) -> None:
    """Receive the missing part of a file, with a progress bar. Raises OSError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get  # hf_hub_download begins anew in every process
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(piece.repository, file.name, repo_type=piece.kind, revision=commit)
    with hub_errors_as_os_errors(), partial.open("ab") as content:
        have = content.tell()
        if have < file.size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            http_get(url, content, resume_size=have, headers=headers, expected_size=file.size)


def differs(path: Path, file: HubFile) -> str:
    """Difference between a file on disk and the hub's record of it; "" if there is none."""
    size = path.stat().st_size
    if size != file.size:
        return f"{size} bytes instead of {file.size}"
    # Small files are kept by git, which hashes a header with them.
    digest, wanted = (
        (hashlib.sha256(), file.sha256) if file.sha256 else (hashlib.sha1(f"blob {size}\0".encode()), file.git_sha1)
    )
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    return "" if digest.hexdigest() == wanted else f"{digest.name.upper()} {digest.hexdigest()} instead of {wanted}"


def note_source(folder: Path, piece: Piece, commit: str, files: list[HubFile]) -> None:
    checksums = {file.name: file.sha256 or f"git {file.git_sha1}" for file in files}
    record = {"repository": piece.repository, "kind": piece.kind, "commit": commit, "sha256": checksums}
    replace_file(folder / SOURCE_FILE, json.dumps(record, indent=1) + "\n")


@contextmanager
def hub_errors_as_os_errors() -> Iterator[None]:
    """Turn errors of the hub's client, which depend on its HTTP library, into OSError."""
    from huggingface_hub.utils import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError.__bases__ as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    run_program(main)
