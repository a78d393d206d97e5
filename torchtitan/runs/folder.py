"""Folder of a run: its configuration, its lock, and its summary."""

import dataclasses
import glob
import json
import logging
import platform
import re
import shlex
import subprocess
import time
from contextlib import ExitStack, suppress
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from torchtitan.checkpoint.finding import BRANCHED_FROM, newest_good
from torchtitan.checkpoint.location import checkpoint_folder, run_checkpoints
from torchtitan.checkpoint.manifest import checkpoint_path, checkpoint_steps
from torchtitan.checkpoint.owner import claim, read_owner
from torchtitan.checkpoint.reading import read_state
from torchtitan.checkpoint.store import foreign_content as foreign_checkpoint_content
from torchtitan.checkpoint.store import store_of
from torchtitan.config.job import JobConfig
from torchtitan.config.latent_cache import cache_folder, without_moved_caches
from torchtitan.errors import CheckpointError, RunFolderError, StoreError
from torchtitan.files.durable import make_folder, remove_unfinished, replace_file
from torchtitan.files.ownership import foreign_text
from torchtitan.files.regular import UnsuitableFile, read_regular, read_toml
from torchtitan.files.remote_path import AnyPath
from torchtitan.files.run_lock import Busy, RunLock
from torchtitan.runs.ownership import CONFIG_FILE, foreign_content
from torchtitan.settings.record import config_differences, dump_config
from torchtitan.training.metric_points import SESSION_FILE
from torchtitan.training.metrics import METRICS_FILE

logger = logging.getLogger(__name__)


class RunFolder:
    """Run folder `<dump_folder>/<name>`, written by the first rank only."""

    def __init__(self, config: JobConfig) -> None:
        self.path = Path(config.job.dump_folder) / config.job.name
        self._config = config
        self._locks = [RunLock(self.path)]  # then that of its checkpoints, where they are elsewhere

    @cached_property
    def checkpoints(self) -> AnyPath:
        return checkpoint_folder(self.path, self._config.checkpoint.folder, self._config.job.name)

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def session(self) -> Path:
        return self.path / SESSION_FILE

    def final_weights(self, step: int) -> Path:
        """Path of the final weights, with the step in the name."""
        return self.path / f"{self._config.job.name}-step-{step:08d}.safetensors"

    def open(self) -> None:
        """Open: create the folder, or check that it holds the same run; lock it.

        Raises:
            Busy: another process writes into the folder.
            RunFolderError: it holds a run with another training, or cannot be written; or the folder of its checkpoints
                is another run's.
            StoreError: that folder is in a store that does not answer.
        """
        try:
            self.check_own()
            make_folder(self.path)
            if owner := self._locks[0].acquire():
                raise Busy(self.path, owner, "give another --job.name")
            with ExitStack() as refused:
                refused.callback(self.close)  # what it holds is another run's
                remove_unfinished(self.path)
                for change in self.check_unchanged():
                    logger.info(f"{self.path}: extending the run, {change}")
                if self._config.checkpoint.enable:
                    self._open_checkpoints()
                elif checkpoint_steps(self._checkpoints_before()):
                    text = "has checkpoints, from which checkpoint.enable = false does not resume (give another --job.name)"
                    raise RunFolderError([f"{self.path}: {text}"])
                refused.pop_all()
        except StoreError:
            raise
        except OSError as error:
            raise RunFolderError([f"{self.path}: cannot be written: {error.strerror}"]) from error

    def check_own(self) -> None:
        """Check that the folder is a run's or may become one. Raises RunFolderError; OSError: it cannot be read."""
        if name := foreign_content(self.path):
            advice = "give another --job.name or --job.dump_folder"
            raise RunFolderError([foreign_text(self.path, name, "a run's", advice)])

    def record(self) -> None:
        """Write config.toml, once the run is built: a refused one leaves what is there. Raises RunFolderError."""
        try:
            # A change is allowed once: a later start from this file asks again.
            job = dataclasses.replace(self._config.job, allow_config_change=False)
            replace_file(self.path / CONFIG_FILE, dump_config(dataclasses.replace(self._config, job=job)))
        except OSError as error:
            raise RunFolderError([f"{self.path}: cannot be written: {error.strerror}"]) from error

    def begin_anew(self) -> None:
        """Delete the checkpoints of an earlier smoke run; on the first rank. Raises Busy, RunFolderError."""
        try:
            steps, checkpoints = read_toml(self.path / CONFIG_FILE)["training"]["steps"], self._checkpoints_before()
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError([f"{self.path / CONFIG_FILE}: is no smoke run's: {error} (give another --job.name)"]) from error
        if steps > self._config.training.steps:
            text = f"holds a run of {steps:,} steps, which is no smoke run"
            raise RunFolderError([f"{self.path}: {text} (give another --job.name)"])
        if owner := self._locks[0].acquire():
            raise Busy(self.path, owner, "give another --job.name")
        for step in checkpoint_steps(checkpoints):
            store_of(checkpoints).delete(step)
        self.close()

    def close(self) -> None:
        """Close: release the folder to others; on the first rank."""
        for lock in self._locks:
            lock.release()

    def check_unchanged(self) -> list[str]:
        """Check that the folder holds a run of the same training, or none; return the change that extends it, if any.

        Raises:
            RunFolderError: it holds a run with another training, and job.allow_config_change is false; or more steps are
                asked of one that has ended, and no checkpoint is left.
            StoreError: the record is in a checkpoint of a store that does not answer.
        """
        if self._config.job.allow_config_change:
            return []
        saved = self.path / CONFIG_FILE
        try:
            old = read_toml(saved)
            damage = "" if old else "is empty"
        except FileNotFoundError:
            old, damage = {}, "is missing"
        except UnsuitableFile as error:
            raise RunFolderError([f"{saved}: {error.strerror} (move it away)"]) from error
        except OSError as error:
            raise RunFolderError([f"{saved}: cannot be read: {error.strerror}"]) from error
        except ValueError as error:  # no TOML, no text
            old, damage = {}, f"is damaged ({error})"
        if damage:
            old = self._recorded_config(f"{saved}: {damage}", needed=saved.exists())
        changes = without_moved_caches(config_differences(old, self._config)) if old else []
        if changes and not self._only_longer(old, changes):
            advice = "give another --job.name, or --job.allow_config_change true to resume it nevertheless"
            if len(changes) == 1 and changes[0].startswith("training.steps: "):
                advice = f"give --training.steps {old['training']['steps']} as it had, or another --job.name"
            place = self.checkpoints if damage else self.path  # whichever has the record
            raise RunFolderError(
                [
                    f"{place}: holds a run of another configuration ({advice})",
                    *(f"  {line}" for line in changes),
                ]
            )
        if changes and self.summary.is_file() and not checkpoint_steps(self._checkpoints_before()):
            raise RunFolderError([f"{self.path}: has no checkpoint from which more steps go on (give another --job.name)"])
        return changes

    def check_cache(self) -> None:
        """Check that a run has trained on the cache that a configuration would fill. Raises RunFolderError: on another."""
        with suppress(OSError, ValueError, KeyError, TypeError):  # a record that cannot be read says nothing
            old = read_toml(self.path / CONFIG_FILE)
            trained, given = Path(old["data"]["path"]).parent.name, cache_folder(self._config).name
            changes = [line for line in config_differences(old, self._config) if not line.startswith(("data.", "cache."))]
            lacking = self._config.lora.enable and not Path(self._config.checkpoint.initial_weights).exists()
            # Weights decide the digest too: where they lack, it says nothing of the data, and who needs them names them.
            if given[-16:] == trained[-16:] or lacking and (not changes or self._only_longer(old, changes)):
                return
            changed = "the pictures, captions or prompts of the cache have changed, or how they are encoded"
            said = f"data: {changed if re.search('-[0-9a-f]{16}$', trained) else 'the run had no cache'}"
            advice = "" if self.is_finished() else ", or --job.allow_config_change true to encode these and resume it"
            lines = [f"{self.path}: holds a run of another configuration (give another --job.name{advice})"]
            lines += [] if lacking else [f"  {said}"]
            raise RunFolderError(lines + [f"  {line}" for line in changes])

    def _only_longer(self, old: dict, changes: list[str]) -> bool:
        """Whether the only change is more steps."""
        if len(changes) != 1 or not changes[0].startswith("training.steps: "):
            return False
        before = old.get("training", {}).get("steps")
        return before is not None and self._config.training.steps > before

    def _recorded_config(self, damage: str, needed: bool) -> dict:
        """Recorded configuration of the newest good checkpoint; empty where there is no checkpoint.

        Raises:
            RunFolderError: it is needed, and no good checkpoint has a record of it.
        """
        if not self._config.checkpoint.enable or not checkpoint_steps(self.checkpoints):
            return {}
        step, _ = newest_good(self.checkpoints)
        recorded = read_state(checkpoint_path(self.checkpoints, step)).get("config") if step is not None else None
        if not isinstance(recorded, dict) or not recorded:
            if not needed:  # checkpoints were put here for a run that begins
                return {}
            advice = "put a copy back, or --job.allow_config_change true to resume with the given configuration"
            raise RunFolderError([f"{damage}, and no checkpoint has a record of the configuration ({advice})"])
        logger.warning(f"{damage}; read from the checkpoint of step {step}")
        return recorded

    def _open_checkpoints(self) -> None:
        before = self._checkpoints_before()
        if str(before) != str(self.checkpoints) and checkpoint_steps(before) and not checkpoint_steps(self.checkpoints):
            copy = ""
            if isinstance(before, Path) and isinstance(self.checkpoints, Path):
                there, here = shlex.quote(str(before)), shlex.quote(str(self.checkpoints))
                copy = f", mkdir -p {here} && cp -r {there}/. {here}"
            advice = f"copy them first{copy}; or give another --job.name"
            raise RunFolderError(
                [f"checkpoint.folder: {self.checkpoints}: has none of the run's checkpoints: they are in {before} ({advice})"]
            )
        if self._config.checkpoint.folder:
            self._refuse_foreign_checkpoints()
        if (self.path / METRICS_FILE).exists() and not checkpoint_steps(self.checkpoints) and self._is_away(before):
            advice = "mount or copy it back; or give another --job.name"
            raise RunFolderError([f"{before}: is not there, where the run {self.path} kept its checkpoints ({advice})"])
        try:
            folder = self._config.checkpoint.folder
            problem = claim(self.path, self.checkpoints, self._lock_checkpoints) if folder else None
        except StoreError:
            raise
        except OSError as error:
            problem = f"checkpoint.folder: {self.checkpoints}: cannot be written: {error.strerror}"
        if problem:
            raise RunFolderError([problem])

    def _lock_checkpoints(self) -> None:
        """Lock a folder of checkpoints outside of the run's: a copy of the run has its identity. Raises Busy, OSError."""
        if isinstance(self.checkpoints, Path) and self.checkpoints.resolve() != self.path.resolve():
            make_folder(self.checkpoints)
            self._locks.append(RunLock(self.checkpoints))
            if owner := self._locks[-1].acquire():
                raise Busy(self.checkpoints, owner, "give another --checkpoint.folder")

    def _is_away(self, checkpoints: AnyPath) -> bool:
        """Check whether a folder of checkpoints that this run has claimed, or a link to one, is not there now."""
        if isinstance(checkpoints, Path) and checkpoints.is_symlink():
            return not checkpoints.exists()
        own = str(checkpoints) == str(self.path / "checkpoint")  # which is not claimed
        return not own and read_owner(self.path) is not None and read_owner(checkpoints) is None

    def has_checkpoints(self) -> bool:
        """Check whether the run has left checkpoints, as far as their store answers."""
        try:
            return bool(checkpoint_steps(self._checkpoints_before()))
        except StoreError:
            return True

    def _checkpoints_before(self) -> AnyPath:
        try:
            return run_checkpoints(self.path)
        except CheckpointError:  # of a config.toml that a checkpoint's record takes the place of
            return self.checkpoints

    def _refuse_foreign_checkpoints(self) -> None:
        if read_owner(self.checkpoints) is None and (name := foreign_checkpoint_content(self.checkpoints)):
            advice = "give another --checkpoint.folder or --job.name"
            refusal = foreign_text(self.checkpoints, name, "a checkpoint", advice)
            raise RunFolderError([f"checkpoint.folder: {refusal}"])

    def is_finished(self) -> bool:
        """Check whether the summary reports the completion of a run of as many steps, or up to the same targets.

        One from another step than `checkpoint.load_step` is not the run asked for, and one that owes a file of final weights
        is not finished.
        """
        try:
            summary = json.loads(read_regular(self.summary))
            steps = summary.get("progress", summary["step"])  # steps of a batch that grew count as several
            ended = steps >= self._config.training.steps
            as_asked = self._config.checkpoint.load_step == -1 or self._is_branch_asked_for(summary)
            done = summary["status"] == "completed" and ended and as_asked
            return done and not self._owes_final_weights(summary["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def _is_branch_asked_for(self, summary: dict) -> bool:
        """Check whether the run is the branch of `checkpoint.load_step`, and its end is there: else it is made anew."""
        asked = self._config.checkpoint
        return asked.load_step == summary.get(BRANCHED_FROM) and checkpoint_path(self.checkpoints, summary["step"]).exists()

    def set_aside_files(self, step: int) -> None:
        """Rename pictures, final weights and averages of steps after one that the run goes back to. Raises RunFolderError."""
        weights = self.path.glob(f"{glob.escape(self._config.job.name)}-step-*.safetensors")
        averages = (self.path / "ema").glob("step-*.safetensors")
        for path in [*self.samples.rglob("step-*.png"), *weights, *averages]:
            numbers = re.findall(r"step-(\d+)", path.name)
            if numbers and int(numbers[-1]) > step:
                try:
                    path.rename(path.with_name(f"set-aside-{time.time_ns()}-{path.name}"))
                except OSError as error:
                    raise RunFolderError([f"{path}: cannot be renamed: {error.strerror}"]) from error

    def restore_record(self) -> None:
        """Write config.toml of a finished run that has lost it, as the checkpoint's record has confirmed the configuration."""
        try:
            lost = not read_toml(self.path / CONFIG_FILE)
        except (OSError, ValueError):
            lost = True
        asked = self._config
        if lost and not (asked.job.allow_config_change or asked.cache.enable) and checkpoint_steps(self.checkpoints):
            with suppress(RunFolderError):  # it is finished all the same
                self.record()

    def _owes_final_weights(self, step: int) -> bool:
        """Check whether final weights are asked for that the run has not written, and its last checkpoint can give."""
        try:
            recorded = read_toml(self.path / CONFIG_FILE).get("checkpoint", {}).get("final_weights", "none")
        except (OSError, ValueError, AttributeError):
            return False
        asked = self._config.checkpoint
        newly = asked.enable and asked.final_weights not in ("none", recorded)
        return newly and checkpoint_path(self.checkpoints, step).exists()

    def write_session(self, content: dict) -> None:
        """Replace session.json: what the processes run on, and the last samples' quality."""
        replace_file(self.session, json.dumps(content, indent=1) + "\n")

    def write_summary(self, content: dict) -> None:
        """Replace summary.json."""
        replace_file(self.summary, json.dumps(content, indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """Versions that a result depends on, and this repository's commit where known."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    try:
        found["numpy"] = version("numpy")
    except PackageNotFoundError:
        found["numpy"] = None
    found["git_commit"] = _git_commit()
    return found


@cache  # that of the code that runs, whatever is committed meanwhile
def _git_commit() -> str | None:
    # `describe --dirty` would write the checkout's index, which is no concern of a run's; `status` can do without.
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    questions = (["describe", "--always", "--abbrev=12"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in questions
        )
        return f"{commit}-dirty" if commit and changes else commit or None
    except (OSError, subprocess.SubprocessError):
        return None
