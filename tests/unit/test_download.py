"""scripts/download.py against a hub and a web server that run here: checksums, resuming, what is refused."""

import hashlib
import http.client
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urlparse

import pytest

from tests.launcher import ROOT
from torchtitan.fidelity.published import PUBLISHED, PublishedWeights
from torchtitan_dit.commands import download as program

COMMIT = "c" * 40
ENCODER = bytes(range(256)) * 4000
CONFIG = b'{"_class_name": "AutoencoderKL"}\n'
needs_hub = pytest.mark.skipif(not importlib.util.find_spec("huggingface_hub"), reason="could not import 'huggingface_hub'")


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub(ThreadingHTTPServer):
    """Repositories in the hub's protocol; `sent` replaces contents on the way, `cut` ends one answer early."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        jit = {"encoder.jit": ENCODER, "decoder.jit": ENCODER[:5000], "model_card.md": b"card"}
        vae = {"config.json": CONFIG, "diffusion_pytorch_model.safetensors": ENCODER[:100]}
        self.repositories = {
            "nvidia/Cosmos-0.1-Tokenizer-CI8x8": jit, "stabilityai/sd-vae-ft-ema": vae,
            "stabilityai/sd-vae-ft-mse": vae, "nvidia/Cosmos-0.1-Tokenizer-CI16x16": {"encoder.jit": ENCODER},
        }  # fmt: skip
        self.sent: dict[str, bytes] = {}
        self.cut = 0
        self.requests: list[tuple[str, str, str | None]] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if found := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path):
            self.describe(found[1])
        elif found := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self.send_file(found[1], found[3])
        else:
            self.answer(404, b"")

    def describe(self, repository: str) -> None:
        siblings = []
        for name, content in self.server.repositories[repository].items():
            entry = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
            if not name.endswith((".json", ".md")):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
            siblings.append(entry)
        self.answer(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())

    def send_file(self, repository: str, name: str) -> None:
        recorded = self.server.repositories[repository][name]
        content = self.server.sent.get(name, recorded)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(recorded).hexdigest()}"'}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, content[first : last + 1], headers)
        else:
            self.answer(200, content, headers)

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if not 0 < self.server.cut < len(body):
            self.wfile.write(body)
            return
        self.wfile.write(body[: self.server.cut])
        self.server.cut, self.close_connection = 0, True


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def download(hub: Hub | None, folder: Path, *words: str) -> tuple[int, str, str]:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}" if hub else "http://127.0.0.1:9"
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run(
        [sys.executable, "scripts/download.py", *words, "--output", str(folder / "downloads")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


def complaint(stderr: str) -> str:
    """The one line of an error; a progress bar may stand before it."""
    lines = [line for line in re.split(r"[\n\r]", stderr) if line.strip() and "%|" not in line]
    assert len(lines) == 1, stderr
    return lines[0]


@needs_hub
def test_files_arrive_once_at_one_commit_and_their_source_is_noted(hub, tmp_path):
    code, output, errors = download(hub, tmp_path, "cosmos-ci8x8", "sd-vae-ft-ema")
    assert code == 0, errors
    assert output.count(COMMIT[:12]) == 2
    folder = tmp_path / "downloads" / "cosmos-ci8x8"
    assert (folder / "encoder.jit").read_bytes() == ENCODER
    assert {path.name for path in folder.iterdir()} == {"encoder.jit", "decoder.jit", "source.json"}
    source = json.loads((folder / "source.json").read_text())
    assert source["commit"] == COMMIT and source["repository"] == "nvidia/Cosmos-0.1-Tokenizer-CI8x8"
    assert source["sha256"]["encoder.jit"] == hashlib.sha256(ENCODER).hexdigest()
    assert (tmp_path / "downloads" / "sd-vae-ft-ema" / "config.json").read_bytes() == CONFIG
    asked = [path for _, path, _ in hub.requests]
    assert "/api/models/stabilityai/sd-vae-ft-ema/revision/f04b2c4b98319346dad8c65879f680b1997b204a" in asked
    assert all(COMMIT in path for path in asked if "/resolve/" in path)  # not whatever is newest by then
    hub.requests.clear()
    assert download(hub, tmp_path, "cosmos-ci8x8")[0] == 0
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


@needs_hub
def test_a_download_that_breaks_off_or_is_killed_goes_on_where_it_was(hub, tmp_path):
    hub.cut = 300_000
    folder = tmp_path / "downloads" / "cosmos-ci8x8"
    code, _, errors = download(hub, tmp_path, "cosmos-ci8x8")
    if code:  # whether the client tries again by itself depends on its version
        assert not (folder / "encoder.jit").exists()
        code, _, errors = download(hub, tmp_path, "cosmos-ci8x8")
    assert code == 0 and (folder / "encoder.jit").read_bytes() == ENCODER, errors
    partial = folder / ".unfinished" / f"encoder.jit.{hashlib.sha256(ENCODER).hexdigest()[:16]}"
    partial.parent.mkdir()
    partial.write_bytes(ENCODER[:123_456])
    (folder / "encoder.jit").unlink()
    hub.requests.clear()
    assert download(hub, tmp_path, "cosmos-ci8x8")[0] == 0
    assert (folder / "encoder.jit").read_bytes() == ENCODER and not partial.parent.exists()
    sent = [asked for command, path, asked in hub.requests if command == "GET" and path.endswith("encoder.jit")]
    assert sent == ["bytes=123456-"]


@needs_hub
def test_damaged_and_foreign_files_are_refused_and_nothing_gets_a_good_name(hub, tmp_path):
    folder = tmp_path / "downloads" / "cosmos-ci8x8"
    hub.sent["encoder.jit"] = ENCODER[:777] + b"?" + ENCODER[778:]
    code, _, errors = download(hub, tmp_path, "cosmos-ci8x8")
    assert code == 2 and "encoder.jit of nvidia/Cosmos-0.1-Tokenizer-CI8x8: arrived damaged: SHA256" in errors
    assert not (folder / "encoder.jit").exists() and not (folder / "source.json").exists()
    hub.sent.clear()
    (folder / "encoder.jit").write_bytes(b"mine")
    code, _, errors = download(hub, tmp_path, "cosmos-ci8x8")
    assert code == 2 and "is another file than that of" in complaint(errors)
    assert (folder / "encoder.jit").read_bytes() == b"mine"
    code, _, errors = download(hub, tmp_path, "cosmos-ci16x16")
    assert code == 2 and "has no decoder.jit at main" in complaint(errors)
    code, _, errors = download(hub, tmp_path, "sd-vae-ft-mse")  # what the hub says is not what we know
    assert code == 2 and "a1d993488569e928462932c8c38a0760b874d166399b14414135bd9c42df5815" in complaint(errors)


@needs_hub
def test_without_a_network_one_line_says_how_to_do_it_by_hand(tmp_path):
    code, output, errors = download(None, tmp_path, "cosmos-ci8x8")
    assert code == 2 and output == ""
    folder = tmp_path / "downloads" / "cosmos-ci8x8"
    by_hand = f"hf download nvidia/Cosmos-0.1-Tokenizer-CI8x8 encoder.jit decoder.jit --local-dir {folder}"
    assert by_hand in complaint(errors) and not folder.exists()


def test_wrong_names_and_the_list_need_no_network(tmp_path):
    code, output, _ = download(None, tmp_path, "--list")
    assert code == 0 and "fal/cosmos-imagenet" in output and "commit f04b2c4b9831" in output
    code, _, errors = download(None, tmp_path, "sd-vae")
    assert code == 2 and "there are cosmos-ci8x8" in complaint(errors)
    code, _, errors = download(None, tmp_path, "cosmos-ci8x8", "sd-vae-ft-ema", "--revision", "x")
    assert code == 2 and "fetch one at a time" in complaint(errors)


def test_files_of_somebody_else_are_neither_replaced_nor_removed(tmp_path):
    source = tmp_path / "downloads" / "sd-vae-ft-ema" / "source.json"
    source.parent.mkdir(parents=True)
    source.write_text('{"mine": 1}')
    code, _, errors = download(None, tmp_path, "sd-vae-ft-ema")
    assert code == 2 and "there is a file that this command did not write; move it away" in complaint(errors)
    assert source.read_text() == '{"mine": 1}'


# ---------------------------------------------------------------------- a single file on the web


class Web:
    """Server of one file, in place of urlopen; `cut` ends one answer early, `ranges` says whether it sends parts."""

    def __init__(self, content: bytes) -> None:
        self.content, self.cut, self.ranges, self.code = content, 0, True, 0
        self.asked: list[str | None] = []

    def __call__(self, request, timeout):
        assert timeout > 0 and request.full_url == "https://example.org/a/network.pth"
        self.asked.append(request.get_header("Range"))
        if self.code:
            raise HTTPError(request.full_url, self.code, "Not Found", http.client.HTTPMessage(), io.BytesIO())
        start = int(self.asked[-1].removeprefix("bytes=").rstrip("-")) if self.ranges and self.asked[-1] else 0
        answer = io.BytesIO(self.content[start : self.cut or None])
        answer.status = 206 if start else 200
        self.cut = 0
        return answer


@pytest.fixture
def web(monkeypatch):
    server = Web(ENCODER)
    weights = PublishedWeights(
        "network", "https://example.org/a/network.pth", len(ENCODER), hashlib.sha256(ENCODER).hexdigest(), "A network"
    )
    monkeypatch.setitem(program.PIECES, "network", program.WebPiece(weights, server))
    return server


def test_a_file_on_the_web_arrives_once_and_its_source_is_noted(web, tmp_path, capsys):
    words = ["network", "--output", str(tmp_path)]
    assert program.main(words) == 0
    folder = tmp_path / "network"
    assert (folder / "network.pth").read_bytes() == ENCODER
    source = json.loads((folder / "source.json").read_text())
    sha256 = hashlib.sha256(ENCODER).hexdigest()
    assert source == {"url": "https://example.org/a/network.pth", "sha256": {"network.pth": sha256}}
    assert {path.name for path in folder.iterdir()} == {"network.pth", "source.json"}
    assert program.main(words) == 0 and web.asked == [None]
    assert capsys.readouterr().out.count("network.pth of https://example.org/a/network.pth\n") == 2


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_on_the_web_resumes_where_it_ended(web, tmp_path, capsys, ranges):
    words = ["network", "--output", str(tmp_path)]
    web.cut, web.ranges = 300_000, ranges
    assert program.main(words) == 2
    line = complaint(capsys.readouterr().err)
    assert "the connection ended after 300,000 of 1,024,000 bytes; the same command resumes" in line
    assert not (tmp_path / "network" / "network.pth").exists()
    assert program.main(words) == 0 and web.asked == [None, "bytes=300000-"]
    assert (tmp_path / "network" / "network.pth").read_bytes() == ENCODER


def test_a_file_on_the_web_that_is_not_the_published_one_gets_no_name(web, tmp_path, capsys):
    words = ["network", "--output", str(tmp_path)]
    web.content = ENCODER[:-1] + b"?"
    assert program.main(words) == 2
    assert "network.pth of https://example.org/a/network.pth: arrived damaged: SHA256" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    web.code = 404
    assert program.main(words) == 2
    line = complaint(capsys.readouterr().err)
    assert "HTTP Error 404: Not Found" in line
    assert f"curl -L -C - --create-dirs -o {tmp_path / 'network/network.pth'} https://" in line
    assert program.main([*words, "--revision", "x"]) == 2
    assert "there is one file only" in complaint(capsys.readouterr().err)


def test_the_weights_of_extractors_can_be_fetched_to_where_they_are_looked_for():
    for name, weights in PUBLISHED.items():
        assert program.PIECES[name].weights is weights
        assert weights.path == Path("downloads") / name / weights.url.rpartition("/")[2]
