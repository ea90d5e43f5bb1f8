"""Look up what this Python would import: versions, origins, and the variables its NCCL reads."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

from ..versions import installed_apex
from .facts import Software
from .library_names import variable_names


def gather_software() -> Software:
    """Imports torch; everything else is read from package metadata and files."""
    import torch

    packages, requirements = _distributions()
    libraries = _loaded_libraries()
    torch_libraries = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_c*.so"))
    cuda = torch.version.cuda
    return Software(
        python=platform.python_version(),
        machine=platform.machine(),
        packages=packages | {"torch": torch.__version__},
        requirements=requirements,
        apex=installed_apex(),
        megatron_origin=_origin("megatron.core"),
        megatron_installed=_installed_file("megatron-core", "megatron/core/__init__.py"),
        torch_cuda=cuda,
        driver_cuda=_driver_cuda(),
        nccl=_nccl_version(torch) if cuda else None,
        nccl_names=variable_names(libraries, ("NCCL_",)) if libraries else None,
        # A CPU build of torch has no NCCL process group, so it knows only some of the names.
        torch_names=variable_names(torch_libraries, ("TORCH_NCCL_", "TORCH_FR_")) if cuda else None,
    )


def nccl_environment(
    environment: dict[str, str], files: tuple[Path, ...] | None = None
) -> dict[str, str]:
    """`environment` over the variables of NCCL's configuration files, which NCCL also reads.

    Args:
        environment: usually `dict(os.environ)`; its values win, as they do in NCCL.
        files: in rising priority; default /etc/nccl.conf, then NCCL_CONF_FILE or ~/.nccl.conf.
    """
    if files is None:
        personal = environment.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
        files = (Path("/etc/nccl.conf"), Path(personal))
    merged: dict[str, str] = {}
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, separator, value = line.partition("=")
            if separator and not name.lstrip().startswith("#"):
                merged[name.strip()] = value.strip()
    return merged | environment


def _distributions() -> tuple[dict[str, str], dict[str, list[str]]]:
    from packaging.utils import canonicalize_name

    versions: dict[str, str] = {}
    requirements: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        # A half-removed package leaves metadata without a name; earlier path entries win.
        name = canonicalize_name(distribution.metadata["Name"] or "")
        if name and name not in versions:
            versions[name] = distribution.version
            requirements[name] = distribution.requires or []
    return versions, requirements


def _origin(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


def _installed_file(distribution: str, file: str) -> str | None:
    try:
        path = importlib.metadata.distribution(distribution).locate_file(file)
    except importlib.metadata.PackageNotFoundError:
        return None
    # An editable install keeps its files elsewhere, on purpose: nothing to compare with.
    return str(path) if os.path.exists(str(path)) else None


def _driver_cuda() -> str | None:
    """The driver's answer; needs no GPU context and allocates nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _nccl_version(torch) -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version()[:3])
    except (AttributeError, RuntimeError, ImportError):
        return None


def _loaded_libraries() -> list[Path]:
    """The libnccl that this process has mapped: the one torch loaded, whatever is installed."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libnccl.so" in line}
    return [Path(file) for file in sorted(files)]
