"""Finds the iteration that a Megatron-LM folder stands for, and the format it was saved in.

    DIR/latest_checkpointed_iteration.txt     "3000", or "release"
    DIR/iter_0003000/                         torch_dist: .metadata, common.pt, *.distcp
    DIR/iter_0003000/mp_rank_00_001/model_optim_rng.pt      torch, one file per TP and PP rank
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

TRACKER = "latest_checkpointed_iteration.txt"
COMMON, INDEX, CONFIG = "common.pt", ".metadata", "metadata.json"
RANK_FOLDER, RANK_FILE = "mp_rank_*", "model_optim_rng.pt"
Format = Literal["torch_dist", "torch", "torch_dcp"]


def format_of(folder: Path) -> Format | None:
    """The format of one iteration's folder, from its file names; None if it holds none.

    `torch_dcp` is every other folder of torch's distributed checkpoint, `fsdp_dtensor` among them.
    """
    if any((rank / RANK_FILE).is_file() for rank in folder.glob(RANK_FOLDER)):
        return "torch"
    if not (folder / INDEX).is_file():
        return None
    return "torch_dist" if (folder / CONFIG).is_file() else "torch_dcp"


def is_megatron_lm(path: Path) -> bool:
    """Whether `path` looks like a Megatron-LM folder or one of its iterations."""
    return (path / TRACKER).is_file() or any(path.glob("iter_*")) or format_of(path) is not None


def find_iteration(path: Path) -> tuple[Path, Format]:
    """The folder of the iteration that `path` is, or that its tracker names; and its format.

    Raises:
        ValueError: if there is none, or it is of a format that is not read.
    """
    folder = path if format_of(path) is not None else _tracked(path)
    found = format_of(folder)
    if found == "torch_dcp":
        raise ValueError(
            f"{str(folder)!r} is a checkpoint of Megatron-FSDP (fsdp_dtensor) or of torch_dcp, "
            "which is not read: bring it to torch_dist with Megatron-LM's "
            "tools/checkpoint/gpt_hybrid_conversion.py --output-format torch_dist (gpt-to-hybrid, "
            "then hybrid-to-gpt), or export it to a Hugging Face folder with Megatron-Bridge"
        )
    if found is None:
        raise ValueError(
            f"{str(folder)!r} holds no Megatron-LM checkpoint: neither {INDEX} with {CONFIG} "
            f"(torch_dist) nor {RANK_FOLDER}/{RANK_FILE} (torch)"
        )
    return folder, found


def _tracked(path: Path) -> Path:
    tracker = path / TRACKER
    if not tracker.is_file():
        iterations = sorted(p.name for p in path.glob("iter_*"))
        raise ValueError(
            f"{str(path)!r} has no {TRACKER} to say which iteration is meant; name one of its "
            f"folders: {', '.join(iterations[-4:]) or 'there are none'}"
        )
    text = tracker.read_text().strip()
    if text != "release" and not text.isdigit():
        raise ValueError(f"{tracker} says {text[:40]!r}: it must be a whole number or 'release'")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} names {folder.name}, but there is no folder {str(folder)!r}")
    return folder
