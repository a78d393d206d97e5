"""Upload of a folder to a repository on the Hugging Face hub."""

from pathlib import Path

from torchtitan.errors import first_line
from torchtitan.extras import install


class HubError(Exception):
    """Repository that cannot be written; the message is one line."""


def upload_folder(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Upload the files of a folder, over those of the same names, into a repository that is made if there is none.

    The token is the environment's (HF_TOKEN), or that of `hf auth login`.

    Args:
        folder: of the files.
        repository: "owner/name".
        private: of a repository that is made.
        message: of the commit.

    Returns:
        address of the commit.

    Raises:
        HubError: the package is missing, or the hub refuses.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise HubError(f"{repository}: uploading needs the package huggingface_hub ({install('hub')})") from error
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message=message))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors and ValueErrors
        raise HubError(f"{repository}: cannot be written: {first_line(error)} (log in by `hf auth login`)") from error
