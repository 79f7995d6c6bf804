# SPDX-License-Identifier: Apache-2.0
"""Snapshots of CUDA memory over chosen training steps, one file for each rank, to be seen at https://pytorch.org/memory_viz."""

import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """What ``torch.cuda.memory`` does."""

    def start(self, max_entries: int) -> None: ...
    def dump(self, file: Path) -> None: ...
    def stop(self) -> None: ...


class _Cuda:
    def start(self, max_entries: int) -> None:
        torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def dump(self, file: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(file))

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


def _cuda_recorder() -> Recorder | None:
    return _Cuda() if torch.cuda.is_available() else None


@dataclass
class MemorySnapshots:
    """Records the memory of ``profile_steps``, as AReaL's ``memory_profiler``: around a step ``with snapshots.step(n):``, or by its callbacks
    ``on_step_begin(n)`` and ``on_step_end(n)``.

    For each of those steps one file ``step{n}_dp{..}_cp{..}_tp{..}_pp{..}.pickle`` in ``directory``. A step that raises leaves a file too,
    ``.._failed.pickle``: that of an out-of-memory error is the one that is wanted. Without CUDA a warning, and nothing is recorded.
    """

    profile_steps: Collection[int] = (0, 1)
    max_entries: int = 100_000
    """Allocations and frees kept; the oldest go first."""
    directory: Path | str = "memory_snapshots"
    ranks: Mapping[str, int] = field(default_factory=dict)
    """This rank's place on the axes ``dp``, ``cp``, ``tp``, ``pp``; 0 on those not named."""
    make_recorder: Callable[[], Recorder | None] = _cuda_recorder
    """None where there is nothing to record."""
    _recorder: Recorder | None = field(default=None, init=False, repr=False)
    _step: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        steps: Any = self.profile_steps  # from a configuration, as likely as not
        if (
            not isinstance(steps, Collection)
            or isinstance(steps, str)
            or not all(type(step) is int and step >= 0 for step in steps)
        ):
            raise ValueError(f"profile_steps {steps!r}: expected step numbers from 0, as [0, 1]")
        if type(self.max_entries) is not int or self.max_entries < 1:
            raise ValueError(
                f"max_entries {self.max_entries!r}: expected a positive number of allocations and frees to keep"
            )
        unknown = sorted(set(self.ranks) - {"dp", "cp", "tp", "pp"})
        if unknown:
            raise ValueError(f"ranks {', '.join(unknown)}: expected dp, cp, tp, pp")

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, **given: Any) -> "MemorySnapshots":
        """Of a section of a configuration, ``{profile_steps: [0, 1], max_entries: 100000}``; without one, snapshots of no step."""
        if config is None:
            return cls(profile_steps=(), **given)
        unknown = sorted(set(config) - {"profile_steps", "max_entries", "directory"})
        if unknown:
            raise ValueError(f"memory snapshots: {', '.join(unknown)}: expected profile_steps, max_entries, directory")
        return cls(**config, **given)

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        self.on_step_begin(number)
        try:
            yield
        except BaseException:
            self._finish(number, failed=True)
            raise
        self.on_step_end(number)

    def on_step_begin(self, number: int) -> None:
        if number not in self.profile_steps or self._recorder is not None:
            return
        recorder = self.make_recorder()
        if recorder is None:
            warnings.warn(f"no memory snapshot of step {number}: CUDA is not available", RuntimeWarning, stacklevel=2)
            return
        recorder.start(self.max_entries)
        self._recorder, self._step = recorder, number

    def on_step_end(self, number: int) -> None:
        """Of the step that began; another number is not listened to."""
        self._finish(number, failed=False)

    def file(self, number: int, failed: bool = False) -> Path:
        """Where the snapshot of a step goes."""
        place = "_".join(f"{axis}{self.ranks.get(axis, 0)}" for axis in ("dp", "cp", "tp", "pp"))
        return Path(self.directory) / f"step{number}_{place}{'_failed' if failed else ''}.pickle"

    def _finish(self, number: int, failed: bool) -> None:
        recorder = self._recorder
        if recorder is None or number != self._step:
            return
        self._recorder = None
        try:
            file = self.file(number, failed)
            file.parent.mkdir(parents=True, exist_ok=True)
            recorder.dump(file)
        finally:
            recorder.stop()
