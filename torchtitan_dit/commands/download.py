"""Fetch public autoencoders, latents and feature extractors: scripts/download.py NAME...

--list shows the names. Each goes to a separate folder, downloads/NAME, with a source.json that names its source. Every
file is compared with a known checksum or the hub's, and gets its name only when they agree; an interrupted download
resumes. Files of the Hugging Face hub need the package huggingface_hub (the extra hub).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO
from urllib.request import Request, urlopen

from tqdm import tqdm

from torchtitan.errors import first_line
from torchtitan.extras import install
from torchtitan.fidelity.published import PUBLISHED, PublishedWeights
from torchtitan.files.durable import make_folder, replace_file, sync
from torchtitan.files.ownership import refuse_foreign_file
from torchtitan.files.removal import remove_folder
from torchtitan.processes.command_line import OneLineParser, refusing

CHUNK = 8 << 20  # bytes hashed at once
UNFINISHED = ".unfinished"
PARTIAL = re.compile(r".+\.[0-9a-f]{16}")
SOURCE_FILE = "source.json"
PATIENCE = 60  # seconds without an answer or a byte


class DownloadError(Exception):
    """Piece that cannot be downloaded; one line: the cause and the remedy."""


@dataclass(frozen=True)
class RemoteFile:
    """File as its source describes it: its size in bytes, and SHA-256 or (small files of the hub) git's SHA-1."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None = None


@dataclass(frozen=True)
class HubPiece:
    """Files of one repository on the Hugging Face hub.

    Attributes:
        revision: the commit that is fetched; "main" is the newest.
        sha256: of files with known content; the hub must agree.
    """

    repository: str
    files: tuple[str, ...]
    what: str
    kind: str = "model"
    revision: str = "main"
    sha256: tuple[tuple[str, str], ...] = ()

    @property
    def source(self) -> str:
        return self.repository

    def description(self) -> tuple[str, str]:
        """Describe it with its size; and source and files."""
        commit = "the newest commit" if self.revision == "main" else f"commit {self.revision[:12]}"
        return self.what, f"{self.repository}, {commit}: {', '.join(self.files)}"

    def command(self, folder: Path, revision: str) -> str:
        """Command that fetches the same files by hand."""
        options = "" if self.kind == "model" else f" --repo-type {self.kind}"
        options += "" if revision == "main" else f" --revision {revision}"
        return f"hf download {self.repository} {' '.join(self.files)}{options} --local-dir {folder}"

    def look_up(self, revision: str) -> tuple[str, list[RemoteFile]]:
        """Find the commit of a revision and its files. Raises OSError, DownloadError."""
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise DownloadError(f"huggingface_hub is needed, and is not installed ({install('hub')})") from error
        with hub_errors_as_os_errors():
            info = HfApi().repo_info(self.repository, repo_type=self.kind, revision=revision, files_metadata=True)
        entries = {entry.rfilename: entry for entry in info.siblings or []}
        files = []
        for name in self.files:
            if name not in entries:
                raise DownloadError(f"{self.repository}: has no {name} at {revision} (choose another --revision)")
            entry = entries[name]
            files.append(RemoteFile(name, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id))
        for name, sha256 in self.sha256:
            recorded = next(file.sha256 for file in files if file.name == name)
            if revision == self.revision and recorded != sha256:
                raise DownloadError(f"{self.repository}: {name} has been replaced: SHA-256 {recorded}, not {sha256}")
        return info.sha, files

    def receive(self, file: RemoteFile, commit: str, content: BinaryIO) -> None:
        """Receive what `content`, open at its end, lacks of a file, with a progress bar. Raises OSError."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get  # hf_hub_download begins anew in every process
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.repository, file.name, repo_type=self.kind, revision=commit)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        with hub_errors_as_os_errors():
            http_get(url, content, resume_size=content.tell(), headers=headers, expected_size=file.size)

    def record(self, commit: str) -> dict[str, str]:
        """Record of the source for source.json."""
        return {"repository": self.repository, "kind": self.kind, "commit": commit}


@dataclass(frozen=True)
class WebPiece:
    """File of weights on the web, of known content.

    Attributes:
        open_url: opens a request, as urllib's urlopen.
    """

    weights: PublishedWeights
    open_url: Callable[..., Any] = urlopen
    revision = ""

    @property
    def source(self) -> str:
        return self.weights.url

    def description(self) -> tuple[str, str]:
        what = f"{self.weights.what}, {self.weights.size / 1e6:,.0f} MB"
        return what, f"{self.weights.url}, SHA-256 {self.weights.sha256[:12]}..."

    def command(self, folder: Path, revision: str) -> str:
        return f"curl -L -C - --create-dirs -o {folder / self.weights.file_name} {self.weights.url}"

    def look_up(self, revision: str) -> tuple[str, list[RemoteFile]]:
        if revision:
            raise DownloadError(f"{self.weights.name}: --revision {revision}: there is one file only (leave it out)")
        return "", [RemoteFile(self.weights.file_name, self.weights.size, self.weights.sha256)]

    def receive(self, file: RemoteFile, commit: str, content: BinaryIO) -> None:
        have = content.tell()
        request = Request(self.weights.url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            with self.open_url(request, timeout=PATIENCE) as answer:
                if answer.status != 206:  # the server sends the whole file
                    content.truncate(0)
                    have = 0
                with tqdm(total=file.size, initial=have, unit="B", unit_scale=True, desc=file.name, disable=None) as bar:
                    while have < file.size and (part := answer.read(min(CHUNK, file.size - have))):
                        content.write(part)
                        have += len(part)
                        bar.update(len(part))
        except HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if have < file.size:
            raise OSError(f"the connection ended after {have:,} of {file.size:,} bytes; the same command resumes")

    def record(self, commit: str) -> dict[str, str]:
        return {"url": self.weights.url}


Piece = HubPiece | WebPiece
JIT = ("encoder.jit", "decoder.jit")
VAE_WEIGHTS = "diffusion_pytorch_model.safetensors"
VAE = ("config.json", VAE_WEIGHTS)
PIECES: dict[str, Piece] = {
    "cosmos-ci8x8": HubPiece("nvidia/Cosmos-0.1-Tokenizer-CI8x8", JIT, "Cosmos image tokenizer, 8x, 16 channels"),
    "cosmos-ci16x16": HubPiece("nvidia/Cosmos-0.1-Tokenizer-CI16x16", JIT, "Cosmos image tokenizer, 16x, 16 channels"),
    "sd-vae-ft-ema": HubPiece(
        "stabilityai/sd-vae-ft-ema", VAE, "VAE of Stable Diffusion, that of DiT; 8x, 4 channels, 335 MB",
        revision="f04b2c4b98319346dad8c65879f680b1997b204a",
    ),
    "sd-vae-ft-mse": HubPiece(
        "stabilityai/sd-vae-ft-mse", VAE, "VAE of Stable Diffusion, smoother; 8x, 4 channels, 335 MB",
        revision="31f26fdeee1355a5c34592e401dd41e45d25a493",
        sha256=((VAE_WEIGHTS, "a1d993488569e928462932c8c38a0760b874d166399b14414135bd9c42df5815"),),
    ),
    "imagenet-ci8x8": HubPiece(
        "fal/cosmos-imagenet", ("imagenet_ci8x8.safetensors", "imagenet_ci8x8_val.safetensors"),
        "ImageNet at 256 x 256 as Cosmos CI8x8 latents, 8 bits, 21 GB", kind="dataset",
    ),
    **{name: WebPiece(weights) for name, weights in PUBLISHED.items()},
}  # fmt: skip


@refusing(DownloadError, stopped="interrupted; the same command resumes")
def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    if arguments.list:
        print(table())
        return 0
    for name in arguments.names:
        fetch(name, arguments.output / name, arguments.revision)
    return 0


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
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
        what, where = piece.description()
        lines += [f"{name:<16} {what}", f"{'':<16} {where}"]
    return "\n".join(lines)


def fetch(name: str, folder: Path, revision: str | None) -> None:
    """Fetch a piece's files to a folder, verified. Raises DownloadError."""
    piece = PIECES[name]
    revision = revision or piece.revision
    try:
        refuse_foreign_file(folder / SOURCE_FILE, f'{{\n "{next(iter(piece.record("")))}": '.encode())
        commit, files = piece.look_up(revision)
        for file in files:
            fetch_file(piece, file, folder, commit)
        note_source(folder, piece, commit, files)
    except OSError as error:
        reason = first_line(error)
        advice = f"by hand, where there is a network: {piece.command(folder, revision)}"
        raise DownloadError(f"{name}: cannot be fetched: {reason} ({advice})") from error
    if left := remove_folder(folder / UNFINISHED, lambda name: PARTIAL.fullmatch(name) is not None):
        print(f"{left[0]}: is not of this download and was left there", file=sys.stderr)
    print(f"{folder}: {', '.join(file.name for file in files)} of {piece.source}{f' at {commit[:12]}' if commit else ''}")


def fetch_file(piece: Piece, file: RemoteFile, folder: Path, commit: str) -> None:
    """Fetch one file to its place; an existing file with the same content stays."""
    target = folder / file.name
    # Named after its content: a partial file of another commit is not resumed.
    partial = folder / UNFINISHED / f"{file.name}.{(file.sha256 or file.git_sha1 or '')[:16]}"
    if target.exists():
        if differs(target, file):
            raise DownloadError(f"{target}: is another file than that of {piece.source} (move it away)")
        return
    make_folder(partial.parent)
    if any(path.is_symlink() for path in (partial.parent, partial)) or partial.exists() and not partial.is_file():
        raise DownloadError(f"{partial}: a link or folder is in the way of the download (move it away)")
    needed = file.size - (partial.stat().st_size if partial.exists() else 0)
    room = shutil.disk_usage(partial.parent).free
    if needed > room:
        raise DownloadError(f"{folder}: {file.name} needs {needed / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free")
    with partial.open("ab") as content:
        if content.tell() < file.size:
            piece.receive(file, commit, content)
    if problem := differs(partial, file):
        partial.unlink()
        raise DownloadError(f"{file.name} of {piece.source}: arrived damaged: {problem} (try again)")
    sync(partial)
    os.replace(partial, target)
    sync(folder)


def differs(path: Path, file: RemoteFile) -> str:
    """Difference between a file on disk and its source's record of it; "" if there is none."""
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


def note_source(folder: Path, piece: Piece, commit: str, files: list[RemoteFile]) -> None:
    checksums = {file.name: file.sha256 or f"git {file.git_sha1}" for file in files}
    replace_file(folder / SOURCE_FILE, json.dumps({**piece.record(commit), "sha256": checksums}, indent=1) + "\n")


@contextmanager
def hub_errors_as_os_errors() -> Iterator[None]:
    """Turn errors of the hub's client, which depend on its HTTP library, into OSError."""
    from huggingface_hub.utils import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError.__bases__ as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
