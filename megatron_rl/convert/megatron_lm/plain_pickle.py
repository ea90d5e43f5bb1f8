"""Reads Megatron-LM's `torch.save` files without running anything from them.

Such a file holds the command line (an `argparse.Namespace` with enums in it), random states (NumPy
arrays), and in the older format the weights. Tensors, plain containers and the namespace are
rebuilt; the other classes that Megatron-LM is known to store become placeholders, which is enough
for what is read here; any other name is refused. Nothing of Megatron-LM has to be installed.
"""

from __future__ import annotations

import argparse
import pickle
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.safe_loading import UnsafeCheckpointError


class Placeholder:
    """Stands for an object that is not needed: takes any contents, does nothing with them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


_REBUILT: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}
_BUILTINS = {"set": set, "frozenset": frozenset, "complex": complex, "bytearray": bytearray}
_REPLACED = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"), ("_io", "BytesIO"),
    ("signal", "Signals"), ("types", "SimpleNamespace"), ("datetime", "timedelta"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("torch", "device"),
    *((f"numpy.{core}.multiarray", name)
      for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}  # fmt: skip
_REPLACED_PACKAGES = ("megatron", "transformer_engine", "numpy.dtypes")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILT:
            return _REBUILT[module, name]
        if module in ("builtins", "__builtin__") and name in _BUILTINS:
            return _BUILTINS[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        known = any(module == p or module.startswith(f"{p}.") for p in _REPLACED_PACKAGES)
        if (module, name) in _REPLACED or known:
            return Placeholder
        raise UnsafeCheckpointError(f"{module}.{name}")


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise UnsafeCheckpointError("a pickle outside torch's zip format")


# torch takes an unpickler in the shape of the module `pickle`.
_MODULE = types.SimpleNamespace(
    __name__="plain_pickle", Unpickler=_Unpickler, load=_refuse, loads=_refuse
)


def read_plain(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The table in a file that Megatron-LM wrote with `torch.save`.

    Args:
        mmap: leave tensors in the file until they are used.

    Raises:
        UnsafeCheckpointError: if the file names anything that such files don't hold.
        ValueError: if it is missing, damaged, or of the format before torch 1.6.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: the folder is incomplete")
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is damaged, or was saved by torch before 1.6: load it with the torch that "
            "wrote it and save it again"
        )
    try:
        table = torch.load(
            path, map_location="cpu", weights_only=False, pickle_module=_MODULE, mmap=mmap
        )
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(
            f"{path} asks for {error}, which is no part of a Megatron-LM checkpoint: it is damaged "
            "or was made to run code; don't use it"
        ) from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {error})") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds a {type(table).__name__}, not a table")
    return table
