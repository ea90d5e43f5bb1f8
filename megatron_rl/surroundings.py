"""What a run needs of the machine around it: variables that agree with it, folders, disk space."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_rl.config import Config, ConfigError
from megatron_rl.models.architecture import Architecture

_GIB = 2**30
# Adam's two moments and the fp32 weight, sgd's fp32 weight: what a checkpoint holds at the least.
_BYTES_PER_PARAMETER = {"adam": 12, "sgd": 4}


def check_variables(config: Config, env: Mapping[str, str]) -> None:
    """Refuses environment variables that contradict the configuration.

    Raises:
        ConfigError: naming the variable, the setting, and which of them to change.
    """
    if config.runtime.device == "cuda":
        if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            _contradiction("runtime.device", "cuda", "CUDA_VISIBLE_DEVICES", env, "hides all GPUs")
        if env.get("TRITON_INTERPRET", "0") not in ("", "0"):
            what = "runs the kernels in Triton's interpreter, on the CPU"
            _contradiction("runtime.device", "cuda", "TRITON_INTERPRET", env, what)
    allowed = (None, ":4096:8", ":16:8")
    workspace = env.get("CUBLAS_WORKSPACE_CONFIG")
    on_gpu = config.runtime.device != "cpu"
    if config.training.deterministic and on_gpu and workspace not in allowed:
        what = "lets cuBLAS give other bits on another run (:4096:8 and :16:8 don't)"
        _contradiction("training.deterministic", True, "CUBLAS_WORKSPACE_CONFIG", env, what)
    if config.monitor.wandb and env.get("WANDB_MODE") == "disabled":
        _contradiction("monitor.wandb", True, "WANDB_MODE", env, "switches it off")
    interface = env.get("GLOO_SOCKET_IFNAME")
    known = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in (interface or "").split(",") if name and name not in known]
    if unknown:
        raise ConfigError(
            f"the environment has GLOO_SOCKET_IFNAME={interface}, but this machine's network "
            f"interfaces are {', '.join(known)}; unset it or name one of these"
        )


def _contradiction(
    setting: str, value: object, name: str, env: Mapping[str, str], what: str
) -> None:
    shown = str(value).lower() if isinstance(value, bool) else value
    raise ConfigError(
        f"{setting} is {shown}, but the environment has {name}={env[name]!r}, which {what}; unset "
        f"{name} or change {setting}",
        setting=setting,
    )


def check_folders(config: Config) -> None:
    """The run's folders can be written to, and a checkpoint that is named exists.

    Nothing is left behind: where a folder is missing, its nearest parent is tried.

    Raises:
        ConfigError: naming the folder and what the system says.
    """
    from_dir = config.checkpoint.dir is not None
    checkpoints = "checkpoint.dir" if from_dir else "run_dir"
    for setting, folder in (
        ("run_dir", Path(config.run_dir)), (checkpoints, config.checkpoint_dir)
    ):  # fmt: skip
        existing = nearest_existing(folder)
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            raise ConfigError(
                f"{setting}: nothing can be written to {str(folder)!r} ({existing}: "
                f"{error.strerror or error}); choose another folder or change its permissions",
                setting=setting,
            ) from error
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise ConfigError(
            f"checkpoint.resume is {resume!r}: there is no such folder; give a checkpoint's "
            "folder, auto or never",
            setting="checkpoint.resume",
        )


def nearest_existing(folder: Path) -> Path:
    """The folder itself, or the nearest of its parents that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_disk(config: Config, trained: Iterable[tuple[str, Architecture]]) -> None:
    """A run that saves has room for one checkpoint at least.

    Args:
        trained: role and architecture of each model that is trained.

    Raises:
        ConfigError: there is less room than the weights and optimizer states alone take.
    """
    if config.checkpoint.save_interval is None:
        return
    needed = sum(
        _parameters(role, architecture) * _BYTES_PER_PARAMETER[getattr(config.training, role).name]
        for role, architecture in trained
    )
    folder = config.checkpoint_dir
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free < needed:
        raise ConfigError(
            f"checkpoint.save_interval is {config.checkpoint.save_interval}, but a checkpoint "
            f"takes {needed / _GIB:,.1f} GiB at least and {str(folder)!r} has "
            f"{free / _GIB:,.1f} GiB free; free some space, or set checkpoint.dir to a larger disk",
            setting="checkpoint.save_interval",
        )


def _parameters(role: str, architecture: Architecture) -> int:
    """Without the output layer for a critic, whose head is a single row."""
    output_layer = 0 if architecture.tied else architecture.vocab * architecture.hidden
    return architecture.parameters() - (output_layer if role == "critic" else 0)
