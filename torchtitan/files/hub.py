"""Files of a published network: a local folder, or a repository on the Hugging Face hub."""

import re
from pathlib import Path

from torchtitan.errors import first_line
from torchtitan.extras import install
from torchtitan.files.regular import user_path
from torchtitan.programs import pasted

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(/[\w-][\w.-]*)?")
DOWNLOADS = "downloads"  # folder of what scripts/download.py fetches


def is_hub_name(path: str) -> bool:
    """Whether a path can be a hub name: "owner/repository" or "owner/repository/folder", and there is no folder "owner" here."""
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path.split("/")[0]).is_dir()


def local_folder(
    model: str, path: str, patterns: list[str], error_class: type[Exception], *, missing: str = "folder"
) -> Path:
    """Local folder of a network's files, fetched from the hub into its cache where `path` is a hub name.

    Args:
        model: name to begin messages with.
        path: a folder; where there is none, a name "owner/repository" or "owner/repository/folder".
        patterns: names of the files to fetch, with * for any letters.
        missing: what is not there, for messages.

    Raises:
        error_class: neither a folder nor a hub name, or it cannot be fetched.
    """
    folder = user_path(path)
    if path and folder.is_dir():
        return folder
    if not path:
        raise error_class(f"{model}: no path: give a folder or a name on the Hugging Face hub")
    if not is_hub_name(path):
        remedy = f" (to fetch it: {pasted('download')} {folder.name})" if folder.parent.name == DOWNLOADS else ""
        raise error_class(f"{model}: {path}: no such {missing}{remedy}")
    repository, subfolder = "/".join(path.split("/")[:2]), "/".join(path.split("/")[2:])
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise error_class(
            f"{model}: {path}: no such {missing} here; to fetch it from the Hugging Face hub: {install('hub')}"
        ) from error
    prefix = f"{subfolder}/" if subfolder else ""
    try:
        fetched = snapshot_download(repository, allow_patterns=[prefix + pattern for pattern in patterns])
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise error_class(
            f"{model}: {path}: no such {missing} here, and it cannot be fetched from the Hugging Face hub: {reason}"
        ) from error
    return Path(fetched) / subfolder
