"""Converts, checks and describes model folders.

    python -m megatron_rl.convert hf-to-megatron --from DIR --to DIR [--role critic] [--dtype bf16]
    python -m megatron_rl.convert megatron-to-hf --from DIR --to DIR [--max-shard-size 5GB]
    python -m megatron_rl.convert verify --from DIR --to DIR
    python -m megatron_rl.convert inspect --from DIR [--yaml]

Exit code: 0 done, 1 verify found a difference, 2 wrong input. See docs/conversion.md.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_rl.convert.describe import facts, models_in, settings
from megatron_rl.convert.hf_weights import VALUE_HEADS
from megatron_rl.convert.kinds import KINDS, Kind, WriteOptions, kind_of
from megatron_rl.convert.staging import carry_out
from megatron_rl.convert.verify import compare
from megatron_rl.convert.verify_logits import TEXT, compare_logits
from megatron_rl.models.gpt import DTYPES

ROLES = ("actor", "critic", "reference", "reward")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def run(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = _parse(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the file it was at", file=sys.stderr)
        return 130


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron_rl.convert", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for source in KINDS:
        for target in KINDS:
            if target.plan is not None and target.name != source.name:
                _add_conversion(commands, source, target)
    _add_verify(commands)
    _add_inspect(commands)
    return parser.parse_args(arguments)


def _add_conversion(commands: argparse._SubParsersAction, source: Kind, target: Kind) -> None:
    command = commands.add_parser(
        f"{source.name}-to-{target.name}", help=f"{source.title} folder to {target.title} folder"
    )
    _add_folders(command)
    command.add_argument("--dtype", choices=sorted(DTYPES), help="of all weights; default: as is")
    command.add_argument(
        "--max-shard-size", type=_size, default=_size("5GB"), metavar="SIZE",
        help="largest weight file, such as 2GB or 500MiB (default 5GB)",
    )  # fmt: skip
    if target.name == "hf":
        command.add_argument(
            "--head-name", choices=VALUE_HEADS, default="score",
            help="name of a value head's tensors (default score, as transformers has it)",
        )  # fmt: skip
    command.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    command.set_defaults(run=lambda options: _convert(options, source, target))


def _add_verify(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("verify", help="is one folder a faithful conversion of another?")
    _add_folders(command, to="the folder that was made from it")
    command.add_argument("--text", type=Path, metavar="FILE", help="text for the logits")
    command.add_argument(
        "--no-logits", action="store_true", help="leave the comparison with transformers out"
    )
    command.set_defaults(run=_verify)


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("inspect", help="what a folder holds")
    command.add_argument("--from", dest="source", required=True, metavar="DIR", type=Path)
    command.add_argument("--yaml", action="store_true", help="as settings of a run")
    command.set_defaults(run=_inspect)


def _add_folders(command: argparse.ArgumentParser, *, to: str = "the result") -> None:
    command.add_argument(
        "--from", dest="source", required=True, metavar="DIR", type=Path, help="read this"
    )
    command.add_argument("--to", dest="target", required=True, metavar="DIR", type=Path, help=to)
    command.add_argument("--role", choices=ROLES, help="which model; default: the one it holds")


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)?\s*", text, re.IGNORECASE)
    try:
        nbytes = int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    except (TypeError, ValueError):
        nbytes = 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or 2GiB")
    return nbytes


def _default_role(kind: Kind, path: Path) -> str:
    return next(iter(kind.roles(path)), "actor")


def _convert(options: argparse.Namespace, source: Kind, target: Kind) -> int:
    start = time.perf_counter()
    found = kind_of(options.source)
    if found is not source:
        raise ValueError(
            f"--from is {str(options.source)!r}, which is a {found.title} folder: use a command "
            f"{found.name}-to-…"
        )
    role = options.role or _default_role(source, options.source)
    folder = source.open(options.source, role, options.dtype == "fp32")
    folder.check()
    write = WriteOptions(
        dtype=DTYPES[options.dtype] if options.dtype else None, max_bytes=options.max_shard_size,
        head_name=getattr(options, "head_name", "score"),
    )  # fmt: skip
    plan = target.plan(folder, write)
    identity = {
        "target": target.name, "role": folder.role, "options": repr(write),
        "source": [[str(p), *_stamp(p)] for p in folder.source_files()],
    }  # fmt: skip
    skipped = carry_out(
        plan, options.target, identity=identity, label=options.target.name,
        overwrite=options.overwrite,
    )  # fmt: skip
    nbytes, seconds = sum(f.nbytes for f in plan.files), time.perf_counter() - start
    again = f", {skipped} of them from an earlier run" if skipped else ""
    print(
        f"{options.target}: {folder.role}, {nbytes / 1e9:,.2f} GB in {len(plan.files)} files"
        f"{again}, {seconds:.1f} s"
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    kinds = [kind_of(path) for path in (options.source, options.target)]
    role = options.role or _default_role(kinds[1], options.target)
    source, result = (
        kind.open(path, role, False)
        for kind, path in zip(kinds, (options.source, options.target), strict=True)
    )
    rows = list(compare(source, result))
    if not options.no_logits and all(row.outcome != "differs" for row in rows):
        text = options.text.read_text() if options.text else TEXT
        rows.append(compare_logits(source, result, text))
    table = Table("", "outcome", "detail", title=f"{role}: {source.path} → {result.path}")
    for row in rows:
        table.add_row(row.name, row.outcome, escape(row.detail))
    _show(table)
    return int(any(row.outcome == "differs" for row in rows))


def _inspect(options: argparse.Namespace) -> int:
    kind, folders = models_in(options.source)
    if options.yaml:
        print(settings(folders), end="")
        return 0
    for folder in folders:
        table = Table("", "", title=folder.role, show_header=False)
        for name, value in facts(kind, folder).items():
            table.add_row(name, escape(value))
        _show(table)
    return 0


def _show(table: Table) -> None:
    # In a file nobody resizes the window.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
