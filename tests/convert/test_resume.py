"""Layer: pure. A conversion that is killed goes on where it was, and never shows half a folder."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from megatron_rl.checkpoint import faults
from megatron_rl.convert.__main__ import main
from tests.convert.test_round_trip import assert_same_weights, convert, weights

SHARD = ("--max-shard-size", "60KB")


def killed(fault: str, command: str, source: Path, target: Path) -> None:
    """Runs the command in a process that kills itself at a named point."""
    child = os.fork()
    if child == 0:
        os.environ[faults.VARIABLE] = fault
        main([command, "--from", str(source), "--to", str(target), *SHARD])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest, which is no older than its folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("point", ["before_shard:3", "after_shard:2", "before_rename:1"])
@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_goes_on(tiny_model_dir, tmp_path, capsys, command, point):
    source = tiny_model_dir
    if command == "megatron-to-hf":
        source = tmp_path / "source"
        convert("hf-to-megatron", tiny_model_dir, source)
    convert(command, source, tmp_path / "undisturbed", *SHARD)
    killed(point, command, source, tmp_path / "result")
    assert not (tmp_path / "result").exists()
    partial = tmp_path / ".result.partial"
    done = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in _finished(partial)}
    assert len(done) == 2 or point.startswith("before_rename")
    shutil.copytree(partial, tmp_path / ".other.partial", copy_function=shutil.copy2)
    capsys.readouterr()
    convert(command, source, tmp_path / "result", *SHARD)
    if not point.startswith("before_rename"):
        assert "2 of them from an earlier run" in capsys.readouterr().out
        for path, stamp in done.items():
            stat = (tmp_path / "result" / path.relative_to(partial)).stat()
            assert (stat.st_ino, stat.st_mtime_ns) == stamp, "a finished file was written again"
    assert content(tmp_path / "result") == content(tmp_path / "undisturbed")
    assert not partial.exists()

    # Another command, or changed weights, start over.
    convert(command, source, tmp_path / "other", *SHARD, "--dtype", "bf16")
    assert "earlier run" not in capsys.readouterr().out


def _finished(partial: Path) -> list[Path]:
    return [*partial.glob("*.safetensors"), *partial.glob("tensors/*.distcp")]


def test_changed_weights_start_over(tiny_model, tmp_path, capsys):
    source = shutil.copytree(tiny_model("llama"), tmp_path / "source")
    killed("after_shard:2", "hf-to-megatron", source, tmp_path / "m")
    shutil.copyfile(tiny_model("llama31") / "model.safetensors", source / "model.safetensors")
    convert("hf-to-megatron", source, tmp_path / "m", *SHARD)
    assert "earlier run" not in capsys.readouterr().out
    convert("megatron-to-hf", tmp_path / "m", tmp_path / "back")
    assert_same_weights(weights(tmp_path / "back"), weights(source))


def test_an_existing_folder_is_replaced_only_when_asked(tiny_model_dir, tmp_path, capsys):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("precious")
    arguments = ["hf-to-megatron", "--from", str(tiny_model_dir), "--to", str(tmp_path / "m")]
    assert main(arguments) == 2
    assert "exists" in capsys.readouterr().err and (tmp_path / "m" / "mine").exists()
    assert main([*arguments, "--overwrite"]) == 0
    assert (tmp_path / "m" / "manifest.json").exists() and not (tmp_path / "m" / "mine").exists()
