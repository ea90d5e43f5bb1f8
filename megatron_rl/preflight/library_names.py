"""Which environment variables a shared library can read, taken from the library itself.

NCCL and torch call getenv with literal names, and a literal ends up NUL-terminated in the ELF
section `.rodata`. Reading that section (under 1 MB of a library that is mostly GPU code) takes
milliseconds, needs no GPU, and is right for exactly the version that is installed, which no list
in a document is.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"


def read_only_data(path: Path) -> bytes:
    """Contents of the section `.rodata` of a 64-bit little-endian ELF file.

    Raises:
        ValueError: if the file is something else or has no such section.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        if image[:6] != _ELF64_LITTLE_ENDIAN:
            raise ValueError(f"{path} is not a 64-bit little-endian ELF library")
        try:
            return _section(image, b".rodata")
        except (struct.error, IndexError) as error:
            raise ValueError(f"{path} has a damaged section table") from error


def _section(image: mmap.mmap, wanted: bytes) -> bytes:
    """Bytes of one section. Offsets are those of Elf64_Ehdr and Elf64_Shdr in elf(5)."""
    (table_offset,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, entries, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", image, table_offset + i * entry_size) for i in range(entries)
    ]
    names_offset = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names_offset + name
        if image[start : start + len(wanted) + 1] == wanted + b"\0":
            return image[offset : offset + size]
    raise ValueError(f"the library has no section {wanted.decode()}")


def variable_names(paths: list[Path], prefixes: tuple[str, ...]) -> frozenset[str] | None:
    """Names starting with one of `prefixes` that the libraries hold as whole strings.

    Returns:
        The names, or None when no library could be read (a check then says "unknown").
    """
    start = b"|".join(prefix.encode() for prefix in prefixes)
    pattern = re.compile(rb"\0((?:" + start + rb")[A-Z0-9_]+)(?=\0)")
    names: set[str] = set()
    read_any = False
    for path in paths:
        try:
            data = read_only_data(path)
        except (OSError, ValueError):
            continue
        read_any = True
        names.update(match.decode() for match in pattern.findall(data))
    return frozenset(names) if read_any else None
