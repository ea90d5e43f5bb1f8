"""The phases of a step: seconds and peak memory of each, on this rank.

Units: seconds and bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

PHASES = (
    "startup", "param_gather", "resharding", "generation", "scoring", "old_logprobs",
    "ref_logprobs", "values", "advantages", "update_critic", "update_actor", "checkpoint",
    "evaluation",
)  # fmt: skip


@dataclass(slots=True)
class PhaseUse:
    """What a phase took on this rank: seconds in all, bytes at the worst moment.

    Attributes:
        allocated: CUDA memory in tensors.
        reserved: CUDA memory that torch's allocator took from the device.
        fragmented: CUDA memory in free pieces of blocks that are partly used: it can neither be
            given back nor serve a larger request.
        resident: memory of this process on the host, when the phase ends.
    """

    seconds: float = 0.0
    allocated: float = 0.0
    reserved: float = 0.0
    fragmented: float = 0.0
    resident: float = 0.0

    def add(self, other: PhaseUse) -> None:
        """The same phase once more: seconds add up, of the memory the larger counts."""
        self.seconds += other.seconds
        for name in MEMORY_FIELDS:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


FIELDS = tuple(field.name for field in dataclasses.fields(PhaseUse))
MEMORY_FIELDS = FIELDS[1:]


class PhaseTimer:
    """Measures phases; the device is drained at both ends of each.

    Attributes:
        current: the phase that runs now, for whoever has to say where a rank is.
        on_enter: called with a phase's name when it begins (the terminal shows it).
        on_error: may turn an exception of a phase into one that says more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current: str | None = None
        self.on_enter: Callable[[str], None] | None = None
        self.on_error: Callable[[str, BaseException], BaseException | None] | None = None
        self._uses: dict[str, PhaseUse] = {}
        self._process = psutil.Process()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs inside, as a range of that name in profiler traces."""
        assert name in PHASES, f"{name!r} is not one of {PHASES}"
        outer, self.current = self.current, name
        if self.on_enter is not None:
            self.on_enter(name)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = self._now()
        try:
            with torch.profiler.record_function(name):
                yield
        except BaseException as error:
            better = self.on_error(name, error) if self.on_error is not None else None
            if better is not None:
                raise better from error
            raise
        else:
            seconds = self._now() - start
            self._uses.setdefault(name, PhaseUse()).add(self._memory(seconds))
        finally:
            self.current = outer

    def take(self) -> dict[str, PhaseUse]:
        """What was measured since the last call, by phase."""
        uses, self._uses = self._uses, {}
        return uses

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _memory(self, seconds: float) -> PhaseUse:
        use = PhaseUse(seconds=seconds, resident=self._process.memory_info().rss)
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            use.allocated = stats.get("allocated_bytes.all.peak", 0)
            use.reserved = stats.get("reserved_bytes.all.peak", 0)
            use.fragmented = stats.get("inactive_split_bytes.all.peak", 0)
        return use
