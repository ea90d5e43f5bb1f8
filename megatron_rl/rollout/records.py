"""Rows of a data set as JSON-like objects: lines of JSONL files, or rows of Parquet files.

Both are read once from beginning to end in pieces, which finds every fault before a run starts, and
then by position. Held in memory are one number per line or row group, and one row group at a time.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

_MAGIC = b"PAR1"
_SCAN_ROWS = 1024
_SUFFIXES = (".jsonl", ".parquet")
_PIECE = re.compile(r"(.*)-(\d{5})-of-(\d{5})\b")


class Records(Protocol):
    """A data set on this disk.

    Attributes:
        fingerprint: identity of the content; known after `scan`.
    """

    fingerprint: str

    def __len__(self) -> int:
        """Rows; known after `scan`."""

    def scan(self) -> Iterator[dict[str, Any]]:
        """Every row once, in order.

        Raises:
            ValueError: naming the first row that can't be read.
        """

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows at `indices`, in that order."""


def open_records(path: Path) -> Records:
    """The rows of a file, or of all files of a folder or a pattern one after the other.

    Args:
        path: a file, whose kind is known by its name or its first bytes; a folder, whose JSONL and
            Parquet files are taken; or a path with `*` in its last part. Files are in the order of
            their names.

    Raises:
        ValueError: there is no such file, one is missing or broken, or what reads it is not
            installed.
    """
    files = [_open(file) for file in _files(path)]
    return files[0] if len(files) == 1 else SeveralFiles(files)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [file for file in path.iterdir() if file.suffix in _SUFFIXES]
        lacks = f"the folder {str(path)!r} has no *.jsonl and no *.parquet"
    elif "*" in path.name:
        found, lacks = list(path.parent.glob(path.name)), f"no file is like {str(path)!r}"
    else:
        found, lacks = [path] if path.is_file() else [], f"there is no file {str(path)!r}"
    if not found:
        raise ValueError(f"{lacks}; check the path")
    if found != [path]:  # a file that is named itself may be a piece
        _check_whole(found)
    return sorted(found)


def _check_whole(files: list[Path]) -> None:
    """Refuses some pieces of a data set that says how many it has (`…-00000-of-00002…`)."""
    for match in filter(None, (_PIECE.search(file.name) for file in files)):
        start, _, count = match.groups()
        here = sum(file.name.startswith(f"{start}-") for file in files)
        if here != int(count):
            raise ValueError(
                f"{files[0].parent} holds {here} of the {int(count)} pieces {start}-…-of-{count}; "
                "fetch the others, or name the files to use"
            )


def _open(path: Path) -> Records:
    with path.open("rb") as file:
        is_parquet = path.suffix == ".parquet" or file.read(len(_MAGIC)) == _MAGIC
    return ParquetRows(path) if is_parquet else JsonLines(path)


class JsonLines:
    """One JSON object per line; empty lines don't count."""

    def __init__(self, path: Path) -> None:
        self.path, self.fingerprint = path, ""
        self._offsets: list[int] = []

    def __len__(self) -> int:
        return len(self._offsets)

    def scan(self) -> Iterator[dict[str, Any]]:
        digest, offset = hashlib.sha256(), 0
        self._offsets = []
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    digest.update(line)
                    self._offsets.append(offset)
                    yield self._parse(line, len(self._offsets))
                offset += len(line)
        self.fingerprint = digest.hexdigest()

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        found = []
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                found.append(self._parse(file.readline(), index + 1))
        return found

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self.path}, row {number} is not JSON ({error}); fix that line"
            ) from error
        if not isinstance(record, dict):
            raise ValueError(
                f"{self.path}, row {number} is of type {type(record).__name__}; each line must be "
                "a JSON object"
            )
        return record


class ParquetRows:
    """The rows of a Parquet file, a row group at a time.

    A row is a dictionary of its columns: texts, numbers, lists and dictionaries as in JSON, null as
    None. What JSON has no type for (dates, bytes, decimals) is Python's.

    Rows that are read together are best neighbours: every row group among them is decoded once.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.fingerprint = path, ""
        self._arrow = _pyarrow(path)
        # What pyarrow raises, and what converting a value to Python may.
        self._faults = (self._arrow.ArrowException, OSError, ValueError, OverflowError)
        try:
            self._file = self._arrow.parquet.ParquetFile(path)
            groups = range(self._file.num_row_groups)
            rows = [self._file.metadata.row_group(group).num_rows for group in groups]
        except self._faults as error:
            raise ValueError(
                f"{path} can't be read as Parquet ({_in_one_line(error)}); write it again, or give "
                "a JSONL file"
            ) from error
        self._starts = [0, *accumulate(rows)]

    def __len__(self) -> int:
        return self._starts[-1]

    def scan(self) -> Iterator[dict[str, Any]]:
        done = 0
        try:
            for batch in self._file.iter_batches(batch_size=_SCAN_ROWS, use_threads=False):
                records = batch.to_pylist()
                yield from records
                done += len(records)
        except self._faults as error:
            last = min(done + _SCAN_ROWS, len(self))
            raise ValueError(
                f"{self.path}, rows {done + 1} to {last} can't be read "
                f"({_in_one_line(error)}); write the file again, or leave them out"
            ) from error
        with self.path.open("rb") as file:
            self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        def rows_of(group: int, rows: list[int]) -> list[dict[str, Any]]:
            return self._file.read_row_group(group, use_threads=False).take(rows).to_pylist()

        return _read_in_parts(indices, self._starts, rows_of)


class SeveralFiles:
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[Records]) -> None:
        self.files, self.fingerprint = files, ""
        self._starts = [0]

    def __len__(self) -> int:
        return self._starts[-1]

    def scan(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            yield from file.scan()
        self._starts = [0, *accumulate(map(len, self.files))]
        prints = "".join(file.fingerprint for file in self.files)
        self.fingerprint = hashlib.sha256(prints.encode()).hexdigest()

    def read(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return _read_in_parts(indices, self._starts, lambda part, rows: self.files[part].read(rows))


def _read_in_parts(
    indices: Sequence[int], starts: list[int],
    rows_of: Callable[[int, list[int]], list[dict[str, Any]]],
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows at `indices`, in that order; each part is read once.

    Args:
        starts: the first row of each part, and the number of all.
        rows_of: the rows of a part, which are counted from its first.
    """
    members: dict[int, list[int]] = {}
    for index in indices:
        members.setdefault(bisect_right(starts, index) - 1, []).append(index)
    found: dict[int, dict[str, Any]] = {}
    for part, wanted in members.items():
        rows = rows_of(part, [index - starts[part] for index in wanted])
        found |= zip(wanted, rows, strict=True)
    return [found[index] for index in indices]


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path} is a Parquet file, which pyarrow reads, and that is not installed ({error}); "
            "pip install pyarrow (the extra parquet), or convert the file to JSONL"
        ) from error
    return pyarrow


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
