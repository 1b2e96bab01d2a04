"""Make models of the Hugging Face Hub local, by their names.

A name is OWNER/MODEL or OWNER/MODEL@REVISION, such as Qwen/Qwen3-0.6B@main. The revision is a
branch, a tag or a commit. A local path of the same name wins. A name whose first part is a local
folder is a local path, too.

The files are in the standard cache of huggingface_hub, which also reads HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE, and shows the progress of a download. It locks each file, so that
several processes on one host download it once. Pickled weights are never downloaded.

A name without a revision, or with a commit, is taken from the cache if the cache has all of its
files. The Hub is then not asked. A branch or a tag is asked for again each time.

A run must not change its models when it is resumed, although a branch may have moved. It therefore
stores the commits that it used (`used_commits`), and a resumed run asks for the same commits
(`use_commits`).
"""

import dataclasses
import errno
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mujica_jax.errors import UserError
from mujica_jax.models.companions import read_json
from mujica_jax.runtime import distributed
from mujica_jax.storage.run_directory import local_folder

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)
# A name for messages.
EXAMPLE = "Qwen/Qwen3-0.6B"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Files of a model, an adapter or an embedder, and files among them that are left out: copies of the
# weights for other programs.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
TOKENIZER_FILES = ("*.json", "*.jinja")
UNWANTED_FILES = ("onnx/*", "openvino/*", "original/*", "consolidated*")
INDEX_FILES = "*.safetensors.index.json"
# Errors of a disk that does not take a download.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

# The commits that this process must use, and those that it has used, by the names of the models.
# Like the models themselves, they are the same in the whole process.
_required_commits: dict[str, str] = {}
_used_commits: dict[str, str] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubName:
    """The name of a model at the Hugging Face Hub."""

    # The part OWNER/MODEL.
    repository: str
    # A branch, a tag or a commit. None: the name has no @REVISION.
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def hub_name(name: str | os.PathLike[str]) -> HubName | None:
    """Return the parts of a Hub name, or None if the name is a local path.

    A local path exists, or its first part is a local folder, or it begins with a dot or a slash.
    """
    match = HUB_NAME.fullmatch(str(name))
    if match is None or Path(name).exists():
        return None
    owner = match["repository"].partition("/")[0]
    if Path(owner).exists():
        return None
    return HubName(repository=match["repository"], revision=match["revision"])


def why_local(name: str | os.PathLike[str]) -> str:
    """Return why a missing path is not asked for at the Hub, for an error message.

    It is empty for a path that looks like no Hub name.
    """
    match = HUB_NAME.fullmatch(str(name))
    if match is None:
        return ""
    owner = match["repository"].partition("/")[0]
    return f" (the Hugging Face Hub is not asked, because there is a local {owner})"


def model_folder(name: str | os.PathLike[str], *, setting: str, otherwise: str = "") -> Path:
    """Return the local folder of a model, adapter or embedder.

    `name` is a local folder, a folder in a bucket or a Hub name. A local folder may be missing.
    Error messages name `setting`, the setting or flag that holds the name. `otherwise` ends the
    message about a failed download, and says what else the user can do. Raises UserError if the
    model cannot be downloaded.
    """
    hub_model = hub_name(name)
    if hub_model is None:
        return local_folder(str(name))
    request = _Request(
        name=hub_model, setting=setting, wanted_files=MODEL_FILES, otherwise=otherwise
    )
    folder = request.folder()
    if not any(folder.rglob("*.safetensors")):
        raise UserError(
            f"the model {name} has no *.safetensors files at the Hugging Face Hub, and other "
            "weights are never loaded, because they can run code when opened: choose a model with "
            "safetensors, or convert it and give the folder"
        )
    return folder


def tokenizer_folder(name: str | os.PathLike[str], *, setting: str) -> Path:
    """Return the local folder of a tokenizer. Like `model_folder`, but without the weights."""
    hub_model = hub_name(name)
    if hub_model is None:
        return local_folder(str(name))
    return _Request(name=hub_model, setting=setting, wanted_files=TOKENIZER_FILES).folder()


def use_commits(commits: Mapping[str, str]) -> None:
    """Require these commits of models, which maps names to commits."""
    _required_commits.update(commits)


def used_commits() -> dict[str, str]:
    """Return the commit of each model that this process has made local, by its name."""
    return dict(_used_commits)


def commit_of(name: str | os.PathLike[str] | None) -> str | None:
    """Return the commit of a model that this process has made local; None for a local path."""
    return _used_commits.get(str(name))


def readme_of(repository: str, commit: str) -> str:
    """Return the model card of a model; empty if it has none, or the Hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        file = huggingface_hub.hf_hub_download(repository, "README.md", revision=commit)
    except (EntryNotFoundError, http_error(), OSError):
        return ""
    return Path(file).read_text(errors="replace")


def check_same_commits() -> None:
    """Check that all processes of the job use the same commits as the first one.

    Hosts with caches of their own could see a branch before and after it moves. Raises UserError.
    """
    first_commits: dict[str, str] = distributed.broadcast("commits of models", used_commits)
    for name, commit in used_commits().items():
        first_commit = first_commits.get(name, commit)
        if commit != first_commit:
            raise UserError(
                f"process {distributed.process()} on {distributed.host()} has commit {commit} of "
                f"{name}, but process 0 has commit {first_commit}: name one commit for all "
                f"processes, as in {name.partition('@')[0]}@{first_commit}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """The files of a model that are wanted.

    Attributes:
        name: The name of the model.
        setting: The setting or flag that holds the name, for error messages.
        wanted_files: The patterns of the wanted files.
        otherwise: What else the user can do if the download fails.
    """

    name: HubName
    setting: str
    wanted_files: Sequence[str]
    otherwise: str = ""

    def folder(self) -> Path:
        """Return the folder in the cache. Download files that it lacks. Raises UserError."""
        # A branch may move while the program runs, so its first commit counts.
        commits = _used_commits | _required_commits
        revision = commits.get(str(self.name), self.name.revision)
        folder = None
        if revision is None or COMMIT.fullmatch(revision):
            folder = self._cached(revision)
        if folder is None:
            folder = self._downloaded(revision)
        _used_commits[str(self.name)] = folder.name
        return folder

    def _cached(self, revision: str | None) -> Path | None:
        """Return the folder in the cache, or None if the cache lacks some of its files."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = self._snapshot(revision, local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        # Another program may have downloaded only a part of the files.
        if self.wanted_files == TOKENIZER_FILES:
            return folder if (folder / "tokenizer.json").exists() else None
        weight_files = {path.name for path in folder.glob("*.safetensors")}
        if not weight_files:
            return None
        for index in folder.glob(INDEX_FILES):
            weight_files |= set(dict(read_json(index).get("weight_map", {})).values())
        return folder if all((folder / file).exists() for file in weight_files) else None

    def _downloaded(self, revision: str | None) -> Path:
        """Download the files that the cache lacks, and return the folder. Raises UserError."""
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        name = self.name
        try:
            return self._snapshot(revision, local_files_only=False)
        except GatedRepoError as error:
            raise UserError(
                f"the model {name} is gated: accept its licence at {_address(name)}, and set "
                "HF_TOKEN to a token of your account"
            ) from error
        except RepositoryNotFoundError as error:
            raise UserError(
                f"{self.setting} is {name}, but there is no local folder of this name, and the "
                "Hugging Face Hub has no such model that you may read: correct the name, or set "
                "HF_TOKEN if the model is private"
            ) from error
        except RevisionNotFoundError as error:
            raise UserError(
                f"the model {name.repository} has no revision {revision or 'main'} at the Hugging "
                "Face Hub: choose a branch, a tag or a commit that is listed at "
                f"{_address(name)}/commits/main"
            ) from error
        except (http_error(), LocalEntryNotFoundError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise UserError(
                    f"the download of {name} cannot be written to {_cache()} ({error.strerror}): "
                    "free some space, or set HF_HOME to a folder on another disk"
                ) from error
            raise UserError(
                f"{self.setting} is {name}, but there is no local folder of this name, and the "
                f"model cannot be downloaded ({_reason(error)}): run `hf download "
                f"{_download_arguments(name)}` on a machine with a connection, and give its "
                f"folder in place of the name{self.otherwise}"
            ) from error

    def _snapshot(self, revision: str | None, *, local_files_only: bool) -> Path:
        """Return the folder in the cache. With `local_files_only`, nothing is downloaded."""
        import huggingface_hub

        folder = huggingface_hub.snapshot_download(
            self.name.repository,
            revision=revision,
            allow_patterns=list(self.wanted_files),
            ignore_patterns=list(UNWANTED_FILES),
            local_files_only=local_files_only,
        )
        return Path(folder)


def http_error() -> type[Exception]:
    """Return the class of all errors of HTTP requests that huggingface_hub makes.

    It belongs to another package in each version: to httpx in version 1, and to httpx2 in version
    2. The library's own errors are derived from it.
    """
    from huggingface_hub.errors import HfHubHTTPError

    http_class = HfHubHTTPError.__bases__[0]
    assert http_class.__name__ == "HTTPError", f"{http_class} is no base class of HTTP errors"
    return http_class


def _reason(error: Exception) -> str:
    """Return in a few words why a download failed, and where it was tried."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    # The library's own message always says that there is no connection. Its cause says more.
    cause = error.__cause__ or error
    if isinstance(cause, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {_cache()} has no complete copy"
    lines = str(cause).strip().splitlines()
    detail = lines[0] if lines else type(cause).__name__
    return f"{constants.ENDPOINT}: {detail}"


def _cache() -> str:
    """Return the folder of the cache, for messages."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _address(name: HubName) -> str:
    """Return the address of a model's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name.repository}"


def _download_arguments(name: HubName) -> str:
    """Return the arguments of `hf download` that download this model."""
    revision = "" if name.revision is None else f" --revision {name.revision}"
    return f"{name.repository}{revision} --local-dir DIR"
