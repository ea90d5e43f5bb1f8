"""Fetch human-rated movie sentences and write the files of the sentiment task.

    python -m launch.fetch_movies             # prints the folder, .cache/movies

10,605 sentences of movie reviews with people's mean rating, from −4 (worst) to 4 (best) (Hutto and
Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text",
ICWSM 2014). They come inside the source package `vaderSentiment` (MIT), so a machine which reaches
nothing but a package registry has them.

    rated_train.jsonl, rated_heldout.jsonl      {"text": …, "rating": …}
    prompts_train.jsonl, prompts_heldout.jsonl  {"prompt": the first words of a held-out sentence}

A reward model is fitted on the first file only, so none of the prompts is one it has seen.
"""

import io
import json
import random
import sys
import tarfile
from pathlib import Path

from launch.fetch_smollm2 import FetchError, command, download, exclusive, sha256_of

PACKAGE = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
ARCHIVE_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
FILES = ("rated_train", "rated_heldout", "prompts_train", "prompts_heldout")
RATED_FOR_FITTING = 6000
EVALUATION_PROMPTS = 256
PROMPT_WORDS = 3


def ensure_movies(cache: Path) -> Path:
    """Return the folder of the task's files under `cache`, made if missing.

    Raises `FetchError` when the package can't be downloaded or is not the expected one.
    """
    folder = cache / "movies"
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock"):
        if not all((folder / f"{name}.jsonl").exists() for name in FILES):
            write_task(read_sentences(_ensure_archive(cache / "downloads")), folder)
    return folder


def read_sentences(archive: Path) -> list[tuple[str, float]]:
    """(text, mean rating) of every sentence, in the file's order."""
    with tarfile.open(archive) as outer:
        with tarfile.open(fileobj=io.BytesIO(outer.extractfile(INNER).read())) as inner:
            lines = inner.extractfile(RATINGS).read().decode("utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line.strip()]
    return [(text.strip(), float(rating)) for _, rating, text in rows]


def write_task(sentences: list[tuple[str, float]], folder: Path, seed: int = 0) -> None:
    """Write the four files; each is whole or as it was before."""
    sentences = sorted(set(sentences))
    random.Random(seed).shuffle(sentences)
    fitted, rest = sentences[:RATED_FOR_FITTING], sentences[RATED_FOR_FITTING:]
    prompts = sorted({p for text, _ in rest if (p := first_words(text)) is not None})
    random.Random(seed).shuffle(prompts)
    contents = {
        "rated_train": [{"text": text, "rating": rating} for text, rating in fitted],
        "rated_heldout": [{"text": text, "rating": rating} for text, rating in rest],
        "prompts_train": [{"prompt": p} for p in prompts[EVALUATION_PROMPTS:]],
        "prompts_heldout": [{"prompt": p} for p in prompts[:EVALUATION_PROMPTS]],
    }
    for name, rows in contents.items():
        partial = folder / f"{name}.partial"
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.replace(folder / f"{name}.jsonl")


def first_words(text: str) -> str | None:
    """The first words of a sentence, or None where hardly more than those would be left."""
    words = text.split()
    return " ".join(words[:PROMPT_WORDS]) if len(words) >= 2 * PROMPT_WORDS else None


def _ensure_archive(downloads: Path) -> Path:
    downloads.mkdir(parents=True, exist_ok=True)
    archive = downloads / ARCHIVE
    if not archive.exists() or sha256_of(archive) != ARCHIVE_SHA256:
        # A source package: pip asks its setup script for the metadata, so it must be the known one.
        requirements = downloads / "movies-requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{ARCHIVE_SHA256}\n")
        download(
            PACKAGE, downloads, ARCHIVE, "2 MB",
            ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes",
             "--requirement", str(requirements)],
        )  # fmt: skip
        requirements.unlink()
    found = sha256_of(archive)
    if found != ARCHIVE_SHA256:
        raise FetchError(
            f"{archive} has sha256 {found}, expected {ARCHIVE_SHA256}; delete it and run again."
        )
    return archive


def main() -> int:
    return command("Fetch rated movie sentences; print the folder.", ensure_movies)


if __name__ == "__main__":
    sys.exit(main())
