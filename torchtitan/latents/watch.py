"""Watch for changed shards of a store while training reads them."""

import hashlib
import os
import queue
import threading
import time
from pathlib import Path

from torch.utils.data import get_worker_info

from torchtitan.files.regular import open_regular
from torchtitan.latents.index import StoreIndex
from torchtitan.programs import program

BYTES_AT_ONCE = 64 << 20  # of the shards that a process uses first: hashed before they are used, about 0.1 s
SECONDS_BETWEEN_LOOKS = 30.0  # at times and sizes of the shards that were good
REST = 1.0  # pause after each part, in the time that it took: half a core at most
_CHUNK = 8 << 20


class ShardWatch:
    """Watch that hashes each shard when it is first used, and again when its time or size has changed.

    A process hashes its first shards at once, until BYTES_AT_ONCE of them are done. The others are left to a thread in
    one process of each machine: a store has hundreds of gigabytes, and training does not wait for them.

    Attributes:
        process: its creator; a thread does not outlive a fork.
        problem: of a shard, one line; "" while there is none.
    """

    def __init__(self, folder: Path, index: StoreIndex) -> None:
        self.process = os.getpid()
        self.problem = ""
        self._folder = folder
        self._files = index.files()
        self._at_once = BYTES_AT_ONCE
        self._good: dict[str, tuple[int, ...]] = {}
        self._used: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: look whether to stop
        self._stopped = False
        self._thread = threading.Thread(target=self._work, daemon=True) if _is_first_of_its_machine() else None

    def use(self, name: str) -> None:
        """Record the first use of a file of the store in this process."""
        size = self._files[name].size
        if size <= self._at_once:
            self._at_once -= size
            self._check(name, rest=0.0)
        if self._thread is not None:
            self._used.put(name)
            if self._thread.ident is None:
                self._thread.start()

    def stop(self) -> None:
        """Stop the thread, if there is one, even with shards waiting."""
        self._stopped = True
        self._used.put(None)

    def _work(self) -> None:
        while not (self.problem or self._stopped):
            try:
                name = self._used.get(timeout=SECONDS_BETWEEN_LOOKS)
                if name is None:
                    continue
            except queue.Empty:
                changed = [name for name in self._good if self._mark(name) not in (None, self._good[name])]
            else:
                changed = [] if name in self._good else [name]
            for name in changed:
                self._check(name, REST)

    def _check(self, name: str, rest: float) -> None:
        path, digest, mark = self._folder / name, hashlib.sha256(), self._mark(name)
        try:
            with open_regular(path) as file:
                while True:
                    started = time.monotonic()
                    if self._stopped:
                        return
                    if not (chunk := file.read(_CHUNK)):
                        break
                    digest.update(chunk)
                    time.sleep((time.monotonic() - started) * rest)
        except OSError as error:
            self.problem = f"{path}: cannot be read: {error.strerror or error}"
            return
        if digest.hexdigest() != self._files[name].sha256:
            self.problem = (
                f"{path}: has changed since it was written, its SHA-256 is another ({program('latents')} verify "
                f"{self._folder} finds all such; take good copies, and resume from a checkpoint of before)"
            )
        elif mark is not None:
            self._good[name] = mark

    def _mark(self, name: str) -> tuple[int, ...] | None:
        """Fingerprint that changes with a file's content; None for a removed file, harmless to mapped readers."""
        try:
            status = os.stat(self._folder / name)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def _is_first_of_its_machine() -> bool:
    worker = get_worker_info()
    return os.environ.get("LOCAL_RANK", "0") == "0" and (worker is None or worker.id == 0)
