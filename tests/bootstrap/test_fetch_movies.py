"""The sentiment task's files (pure): split, prompts, what is fetched and what is refused."""

import hashlib
import io
import json
import os
import tarfile

import pytest

from launch import fetch_movies
from launch.fetch_smollm2 import FetchError

SENTENCES = [(f"sentence {i} has a few words and says more", (i % 9) - 4.0) for i in range(50)]
SENTENCES += [("Too short", 1.0), ("sentence 0 has a few words and says more", -4.0)]


def archive_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def package() -> bytes:
    lines = [f"{i}\t{rating}\t{text}" for i, (text, rating) in enumerate(SENTENCES)]
    ratings = "\r\n".join(lines).encode() + b"\r\n"
    inner = archive_of({fetch_movies.RATINGS: ratings})
    return archive_of({fetch_movies.INNER: inner})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache whose downloads hold a package of our own."""
    content = package()
    monkeypatch.setattr(fetch_movies, "ARCHIVE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch_movies, "RATED_FOR_FITTING", 30)
    monkeypatch.setattr(fetch_movies, "EVALUATION_PROMPTS", 5)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / fetch_movies.ARCHIVE).write_bytes(content)
    return tmp_path


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_prompts_begin_sentences_that_the_reward_model_never_saw(cache):
    folder = fetch_movies.ensure_movies(cache)
    fitted, heldout = rows(folder, "rated_train"), rows(folder, "rated_heldout")
    assert len(fitted) == 30
    texts = [row["text"] for row in fitted + heldout]
    assert sorted((row["text"], row["rating"]) for row in fitted + heldout) == sorted(
        set(SENTENCES)
    )
    assert texts != sorted(texts)
    train, evaluation = rows(folder, "prompts_train"), rows(folder, "prompts_heldout")
    prompts = [row["prompt"] for row in train + evaluation]
    assert len(evaluation) == 5 and len(set(prompts)) == len(prompts)
    beginnings = {fetch_movies.first_words(row["text"]) for row in heldout} - {None}
    assert set(prompts) == beginnings and "Too short" not in prompts


def test_a_second_call_changes_nothing_and_a_missing_file_is_made_again(cache):
    folder = fetch_movies.ensure_movies(cache)
    before = {name: (folder / f"{name}.jsonl").read_text() for name in fetch_movies.FILES}
    (cache / "downloads" / fetch_movies.ARCHIVE).unlink()
    assert fetch_movies.ensure_movies(cache) == folder
    (cache / "downloads" / fetch_movies.ARCHIVE).write_bytes(package())
    (folder / "prompts_train.jsonl").unlink()
    fetch_movies.ensure_movies(cache)
    assert before == {n: (folder / f"{n}.jsonl").read_text() for n in fetch_movies.FILES}


def test_another_package_than_the_known_one_is_not_opened(cache, monkeypatch, capsys):
    (cache / "downloads" / fetch_movies.ARCHIVE).write_bytes(b"something else")
    monkeypatch.setattr("sys.argv", ["fetch_movies", "--cache", str(cache)])
    assert fetch_movies.main() == 1
    error = capsys.readouterr().err
    assert "error: pip could not download vaderSentiment" in error
    with pytest.raises(FetchError, match="registry is reachable"):
        fetch_movies.ensure_movies(cache)
    assert not (cache / "movies" / "rated_train.jsonl").exists()
