"""Hugging Face Hub ids wherever a model, tokenizer or data set is named.

A name that exists on disk is that folder or file. Otherwise `owner/name` is looked up on the hub
(for data sets also `owner/name/file.jsonl`) and fetched into huggingface_hub's cache: once per
node, while the node's other ranks wait. Where the hub is, the token, the cache and offline mode
are huggingface_hub's own: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.once_per_node import NodeRank, once_per_node

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".jsonl", ".json", ".model", ".safetensors", ".yaml", ".parquet")
_TOKENIZER_FILES = [
    "config.json", "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template*",
]  # fmt: skip
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "value_head.bin"]
# Only where there are no safetensors.
_TORCH_FILES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
# Second copies of the weights in other layouts, and whatever lies in subfolders.
_NOT_NEEDED = ["consolidated*", "*/*"]
_DATA_KINDS = (".jsonl", ".parquet")
_SPLIT_NAMES = {
    "train": ("train",),
    "eval": ("eval", "test", "validation", "valid", "dev", "held_out"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A name as the user gave it.

    Attributes:
        name: a path or a hub id.
        revision: branch, tag or commit of a hub id; None is the default branch.
        setting, revision_setting: where both were given, for messages.
    """

    name: str
    revision: str | None
    setting: str
    revision_setting: str

    def refuse(self, rule: str, way_out: str) -> ConfigError:
        return ConfigError(
            f"{self.setting} is {self.name!r}: {rule}; {way_out}", setting=self.setting
        )


def is_hub_id(name: str) -> bool:
    """Whether `name` is written like a hub id (`owner/name`) and no such path exists."""
    is_file_name = name.endswith(_FILE_SUFFIXES)
    return bool(_ID.fullmatch(name)) and not is_file_name and not Path(name).exists()


def model_folder(named: Named, node: NodeRank, *, trust_remote_code: bool = False) -> Path:
    """The local folder of a model: weights, configuration and tokenizer.

    Args:
        trust_remote_code: fetch the repository's Python files too.

    Raises:
        ConfigError: one sentence for each way in which there is no such folder.
    """
    files = [*_MODEL_FILES, "*.py"] if trust_remote_code else _MODEL_FILES

    def download() -> str:
        folder = _snapshot(named, named.name, "model", files, _NOT_NEEDED)
        if not any(Path(folder).glob("*.safetensors")):
            folder = _snapshot(named, named.name, "model", files + _TORCH_FILES, _NOT_NEEDED)
        return folder

    expected = "a Hugging Face model folder (config.json, *.safetensors)"
    return _folder(named, node, download, expected)


def tokenizer_place(named: Named, node: NodeRank, *, trust_remote_code: bool = False) -> Path:
    """The local folder (or single file) of a tokenizer; see `model_folder`."""
    if Path(named.name).is_file():
        return _without_revision(named)
    files = [*_TOKENIZER_FILES, "*.py"] if trust_remote_code else _TOKENIZER_FILES

    def download() -> str:
        return _snapshot(named, named.name, "model", files, _NOT_NEEDED)

    return _folder(named, node, download, "a folder with the tokenizer's files")


def prompt_file(named: Named, node: NodeRank, *, split: str) -> Path:
    """The local JSONL or Parquet file of prompts: a path, `owner/name` or `owner/name/file`.

    Args:
        split: "train" or "eval": which file is meant where the data set has several.

    Returns:
        A file; a folder or a pattern with `*` for data in pieces (see `rollout.records`).

    Raises:
        ConfigError: one sentence for each way in which there is no such file.
    """
    owner_and_name, file = _split_data_id(named.name)
    if owner_and_name is None:
        return _without_revision(named)

    def download() -> str:
        return str(_data_file(named, owner_and_name, file, split))

    return Path(once_per_node(_in_words(named, owner_and_name), download, node))


def is_data_id(name: str) -> bool:
    """Whether `name` is a data set's hub id, with or without a file in it, and no path here."""
    return _split_data_id(name)[0] is not None


def _split_data_id(name: str) -> tuple[str | None, str | None]:
    """`owner/name[/file.jsonl]` → (`owner/name`, file or None); (None, None) for a path."""
    if Path(name).exists() or ("*" in name and Path(name).parent.is_dir()):
        return None, None
    if is_hub_id(name):
        return name, None
    parts = name.split("/", 2)
    if len(parts) == 3 and name.endswith(_FILE_SUFFIXES) and is_hub_id("/".join(parts[:2])):
        return "/".join(parts[:2]), parts[2]
    return None, None


def _data_file(named: Named, repository: str, file: str | None, split: str) -> Path:
    """Fetches the file that is meant: the one named, that of the split, or the only one.

    Files whose names differ in numbers alone are pieces of one.
    """
    of_split = [
        [f"{start}{name}*{kind}" for name in _SPLIT_NAMES[split] for start in ("", "*/")]
        for kind in _DATA_KINDS
    ]
    listed = _listed(named, repository)
    for patterns in [[file]] if file else [*of_split, *([f"*{kind}"] for kind in _DATA_KINDS)]:
        names = listed
        if names is None:
            names = _files_in(Path(_snapshot(named, repository, "dataset", patterns, [])))
        found = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
        if found:
            break
    if not found:
        raise named.refuse(
            f"the data set has no {'file ' + repr(file) if file else 'JSONL or Parquet file'}",
            "prompts are read from these: check the name or convert the data first",
        )
    pieces = {re.sub(r"\d+", "*", name) for name in found}
    unclear = len(pieces) > 1 and "*" not in (file or "")
    if unclear or (split == "eval" and Path(found[0]).name.startswith("train") and not file):
        raise named.refuse(
            f"which of the data set's files is meant is not clear ({', '.join(found[:4])})",
            f"name one, as in {repository}/{found[0]}",
        )
    meant = found[0] if len(found) == 1 else file or pieces.pop()
    return Path(_snapshot(named, repository, "dataset", found, [])) / meant


def _listed(named: Named, repository: str) -> list[str] | None:
    """What files a data set has, so that only the one that is meant is fetched; None: the hub can't
    be asked, and the cache or the attempt to fetch will tell."""
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name="megatron-rl")
        return sorted(api.list_repo_files(repository, repo_type="dataset", revision=named.revision))
    except Exception:  # noqa: BLE001 - whatever it is, fetching meets it again and explains it
        return None


def _files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _folder(named: Named, node: NodeRank, download: Callable[[], str], expected: str) -> Path:
    if Path(named.name).is_dir():
        return _without_revision(named)
    if not is_hub_id(named.name):
        raise named.refuse("there is no such folder", f"give {expected} or a hub id (owner/name)")
    return Path(once_per_node(_in_words(named, named.name), download, node))


def _without_revision(named: Named) -> Path:
    if named.revision is not None:
        raise ConfigError(
            f"{named.revision_setting} is {named.revision!r}, but {named.setting}={named.name!r} "
            "is on this disk, and only hub ids have revisions; remove it or give a hub id",
            setting=named.revision_setting,
        )
    return Path(named.name)


def _in_words(named: Named, repository: str) -> str:
    return f"fetch {repository} ({named.revision or 'default branch'}) for {named.setting}"


def _snapshot(
    named: Named, repository: str, kind: str, files: list[str], without: list[str]
) -> str:
    """Fetches the files of a repository; returns the folder in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return snapshot_download(
            repository, repo_type=kind, revision=named.revision, allow_patterns=files,
            ignore_patterns=without, library_name="megatron-rl",
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - the HTTP library's errors differ by its version
        raise _explain(error, named, repository) from error


def _explain(error: Exception, named: Named, repository: str) -> ConfigError:
    """One sentence for each way in which fetching fails."""
    from huggingface_hub import constants, errors

    hub, offline = constants.ENDPOINT, constants.HF_HUB_OFFLINE
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return named.refuse(
            f"{hub}/{repository} is gated",
            "accept its terms on its page, then log in with `hf auth login` or HF_TOKEN",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return named.refuse(
            f"there is neither such a path here nor a repository {repository!r} on {hub}",
            "check the name, or log in with `hf auth login` or HF_TOKEN if it is private",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"{named.revision_setting} is {named.revision!r}: {repository} has no such revision on "
            f"{hub}; name a branch, a tag or a commit",
            setting=named.revision_setting,
        )
    if status in (401, 403):
        return named.refuse(
            f"{hub} refused access ({status})", "log in again with `hf auth login` or HF_TOKEN"
        )
    if offline:
        return named.refuse(
            "there is no such path here, and HF_HUB_OFFLINE is set while revision "
            f"{named.revision or 'main'} is not whole in the cache {constants.HF_HUB_CACHE}",
            "fetch it once without HF_HUB_OFFLINE, or give a folder",
        )
    if getattr(error, "errno", None) == errno.ENOSPC:
        return named.refuse(
            f"no room in the cache {constants.HF_HUB_CACHE}", "set HF_HOME to a larger disk"
        )
    return named.refuse(
        f"there is no such path here, and {hub} could not be asked ({_first_line(error)})",
        "check the network (HF_ENDPOINT, HTTPS_PROXY), or fetch it elsewhere and give the folder",
    )


def _first_line(error: BaseException) -> str:
    """The innermost cause, which says what happened; what wraps it says it in paragraphs."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
