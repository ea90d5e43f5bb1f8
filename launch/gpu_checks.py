"""All that needs a GPU, part by part within a time budget: tests first, then the benchmarks.

    python -m launch.gpu_checks --output DIR [--budget SECONDS] [PATTERN …]
    python -m launch.gpu_checks --list            # names, expected seconds, commands
    python -m launch.gpu_checks --dry-run --budget 540 'tests-*' generation-8b

Each part is a process of its own with its own time limit, and its output is DIR/NAME.log. A part
that fails or hangs does not stop the next one; one that would not fit into what is left of the
budget, or needs more GPUs than there are, is skipped and named. The table at the end is also
DIR/summary.txt; the exit status is 1 if a part failed or none ran. `--small` runs, without a GPU,
the parts that have a small form: it shows that they start, and their figures mean nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "{model}"  # stands for the folder of a tiny model with a tokenizer
TIMED_OUT = 124


@dataclass(frozen=True)
class Part:
    """One process: the Python interpreter with these arguments.

    Attributes:
        seconds: expected on an H200; the time limit is twice that and a minute.
        small: arguments of the form that runs on a CPU in less than a minute.
    """

    name: str
    seconds: int
    arguments: tuple[str, ...]
    gpus: int = 1
    small: tuple[str, ...] | None = None

    @property
    def limit(self) -> int:
        return 2 * self.seconds + 60

    def command(self, small: bool, model: str = MODEL) -> list[str]:
        arguments = self.small if small else self.arguments
        assert arguments is not None, f"{self.name} has no small form"
        return [sys.executable, *(a.replace(MODEL, model) for a in arguments)]


@dataclass(frozen=True)
class Outcome:
    """What became of a part; `status` is None where it was skipped."""

    name: str
    status: int | None
    seconds: float
    last_line: str


def tests(name: str, seconds: int, arguments: str, *, gpus: int = 1) -> Part:
    return Part(name, seconds, ("-m", "pytest", "-q", *shlex.split(arguments)), gpus)


def bench(name: str, seconds: int, arguments: str, *, gpus: int = 1, small: str = "") -> Part:
    both = (tuple(shlex.split(text)) or None for text in (arguments, small))
    command, reduced = both
    return Part(name, seconds, command, gpus, reduced)


def kernel(name: str, seconds: int, arguments: str = "", *, suffix: str = "") -> Part:
    return bench(
        f"kernel-{name.replace('_', '-')}{suffix}", seconds,
        f"-m megatron_rl.kernels.{name}.bench {arguments}",
    )  # fmt: skip


GENERATE, SAVE = "benchmarks/generation.py", "benchmarks/checkpoint_save.py"
LAUNCH = "-m torch.distributed.run --standalone --nproc_per_node"
# Kernel tests run compiled where there is a GPU, so whole folders are chosen, not only `-m gpu`.
PARTS = (
    tests("tests-one-gpu", 90, "-m gpu tests/gpu --ignore tests/gpu/test_deterministic_resume.py "
          "--ignore tests/gpu/test_on_two_gpus.py"),
    tests("tests-resume", 150, "-m gpu tests/gpu/test_deterministic_resume.py"),
    tests("tests-hybrid", 45, "-m gpu tests/hybrid tests/resharding"),
    tests("tests-monitor", 90, "-m gpu tests/monitor tests/operate"),
    tests("tests-int8", 180, "tests/int8/test_int8_kernels.py"),
    tests("tests-kernels", 240, "tests/kernels tests/models/test_vocabulary_logits.py"),
    tests("tests-two-gpus", 90, "-m gpu tests/gpu/test_on_two_gpus.py", gpus=2),
    bench("offload", 30, "benchmarks/offload.py"),
    bench("offload-memory", 200, f"benchmarks/offload_memory.py --tokenizer {MODEL}",
          small=f"benchmarks/offload_memory.py --tokenizer {MODEL} --shape tiny --steps 2 "
                "--batch 4 --new 8"),
    kernel("decode_attention", 60, "--new"),
    kernel("int8_allreduce", 150, "--sizes 26 28 30 --path"),
    kernel("int8_allreduce", 150, "--sizes 30 --sweep", suffix="-sweep"),
    kernel("reshard", 120, "--peer"),
    kernel("rms_norm", 20),
    kernel("rope_kv_write", 20),
    kernel("sampling", 40),
    kernel("swiglu", 20),
    kernel("thin_linear", 60),
    bench("generation-1b", 90, f"{GENERATE} --shape 1b --batch 1 64 256",
          small=f"{GENERATE} --model {MODEL} --batch 2 --prompt 8 --new 8 --repeats 1"),
    bench("generation-8b", 120, f"{GENERATE} --shape 8b --batch 1 32 256"),
    bench("generation-experts", 150, f"{GENERATE} --shape 30b-a3b --batch 1 64 256"),
    bench("generation-lognormal", 75, f"{GENERATE} --shape 1b --lognormal 512"),
    bench("generation-forked", 40, f"{GENERATE} --shape 1b --forked"),
    bench("generation-peer", 150, f"{GENERATE} --shape 1b --batch 64 --repeats 1 --peer static"),
    bench("generation-peers", 260,
          f"{GENERATE} --shape 1b --batch 64 --lognormal 512 --repeats 1 --peer batch megatron",
          small=f"{GENERATE} --model {MODEL} --batch 2 --prompt 8 --new 8 --repeats 1 "
                "--peer batch megatron"),
    bench("checkpoint", 150, f"{LAUNCH} 1 {SAVE} --hidden 1024 --layers 16 --steps 24 --every 6",
          small=f"{LAUNCH} 1 {SAVE} --hidden 64 --layers 1 --steps 4 --every 2"),
    bench("int8-link", 60, f"{LAUNCH} 2 benchmarks/int8_link.py", gpus=2),
    bench("resharding-link", 90, f"{LAUNCH} 2 -m megatron_rl.resharding.bench --peer", gpus=2),
)  # fmt: skip


def choose(patterns: Sequence[str], parts: Sequence[Part] = PARTS) -> list[Part]:
    """The parts whose name matches one of the shell patterns, in their own order; all without.

    Raises:
        ValueError: a pattern that matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter([part.name for part in parts], pattern):
            raise ValueError(
                f"no part matches {pattern!r}; there are {', '.join(p.name for p in parts)}"
            )
    return [
        part for part in parts
        if not patterns or any(fnmatch.fnmatch(part.name, pattern) for pattern in patterns)
    ]  # fmt: skip


def refusal(part: Part, *, left: float, gpus: int, small: bool) -> str:
    """Why a part does not run now, empty where it does."""
    if small:
        return "" if part.small else "has no small form"
    if part.gpus > gpus:
        return f"needs {part.gpus} GPU{'s' * (part.gpus > 1)}, there are {gpus}"
    return "" if part.seconds <= left else f"takes {part.seconds} s, {max(left, 0):.0f} s are left"


def run_part(command: Sequence[str], log: Path, limit: float) -> int:
    """Exit status of a process whose output goes to `log`, TIMED_OUT where it was ended."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        print(shlex.join(command), file=output, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            # Its ranks and workers too, also when this program is interrupted.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_parts(
    parts: Sequence[Part], output: Path, *, budget: float, gpus: int, small: bool, model: str
) -> list[Outcome]:
    """Runs what fits, one after the other."""
    begin, outcomes = time.monotonic(), []
    for part in parts:
        left = budget - (time.monotonic() - begin)
        why = refusal(part, left=left, gpus=gpus, small=small)
        if why:
            outcomes.append(Outcome(part.name, None, 0.0, why))
            continue
        print(f"{part.name}: at most {min(part.limit, left):.0f} s …", flush=True)
        log, start = output / f"{part.name}.log", time.monotonic()
        status = run_part(part.command(small, model), log, min(part.limit, left))
        seconds = time.monotonic() - start
        outcomes.append(Outcome(part.name, status, seconds, last_line(log)))
        print(f"{part.name}: exit {status} after {seconds:.0f} s", flush=True)
    return outcomes


def last_line(log: Path) -> str:
    """The last line that says something."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip(" =-|")), "")


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [f"{'part':28} {'exit':>7} {'seconds':>8}  last line"]
    for done in outcomes:
        status = {None: "skipped", TIMED_OUT: "time"}.get(done.status, str(done.status))
        rows.append(f"{done.name:28} {status:>7} {done.seconds:8.0f}  {done.last_line[:110]}")
    return "\n".join(rows)


def show_plan(parts: Sequence[Part], budget: float, gpus: int, small: bool) -> None:
    left = budget
    for part in parts:
        why = refusal(part, left=left, gpus=gpus, small=small)
        left -= 0 if why else part.seconds
        command = shlex.join(part.command(small and part.small is not None)[1:])
        print(f"{part.name:28} {part.seconds:5} s  {f'skipped: {why}' if why else command}")


def device_count() -> int:
    import torch

    return torch.cuda.device_count()


def tiny_model(folder: Path) -> str:
    """A folder with a random model and a tokenizer: nothing has to be fetched."""
    from tests.tiny_models import write_tiny_model

    return str(write_tiny_model("llama", folder))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", help="names of parts, * and ? allowed; default all")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--output", type=Path, help="where logs and the table go")
    parser.add_argument("--small", action="store_true", help="small forms, without a GPU")
    parser.add_argument("--list", action="store_true", help="show all parts and end")
    parser.add_argument("--dry-run", action="store_true", help="show what would run and end")
    options = parser.parse_args(arguments)
    try:
        parts = choose(options.patterns)
    except ValueError as error:
        parser.error(str(error))
    if options.list or options.dry_run:
        show_plan(parts, float("inf") if options.list else options.budget, 8, options.small)
        return 0
    if options.output is None:
        parser.error("--output is missing: name a folder for the logs")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    needs_model = any(MODEL in text for p in parts for text in (p.small or ()) + p.arguments)
    model = tiny_model(output / "tiny_model") if needs_model else ""
    outcomes = run_parts(
        parts, output, budget=options.budget, gpus=device_count(), small=options.small,
        model=model,
    )  # fmt: skip
    text = table(outcomes)
    (output / "summary.txt").write_text(text + "\n")
    print(text)
    ran = [done for done in outcomes if done.status is not None]
    return int(not ran or any(done.status for done in ran))


if __name__ == "__main__":
    sys.exit(main())
