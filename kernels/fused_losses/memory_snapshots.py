# SPDX-License-Identifier: Apache-2.0
"""Snapshots of CUDA memory over chosen training steps, one file for each rank.

View them at https://pytorch.org/memory_viz.
"""

import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records the history of memory, as ``torch.cuda.memory`` does."""

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
    """Records the memory of some training steps, like AReaL's ``memory_profiler``.

    Put ``with snapshots.step(n):`` around a step, or call ``on_step_begin(n)`` and
    ``on_step_end(n)``. Each of ``profile_steps`` leaves a file
    ``step{n}_dp{..}_cp{..}_tp{..}_pp{..}.pickle`` in ``directory``. A step that raises inside
    ``step`` leaves a file ``.._failed.pickle``, which shows what an out-of-memory error ran into.
    Without CUDA there is a warning, and nothing is recorded.

    Raises:
        ValueError: A setting does not fit; the message names it.
    """

    profile_steps: Collection[int] = (0, 1)
    """Numbers of the steps to record."""
    max_entries: int = 100_000
    """Number of allocations and frees to record; the oldest are dropped first."""
    directory: Path | str = "memory_snapshots"
    """Where the files go; created if missing."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """This rank's coordinates on the axes ``dp``, ``cp``, ``tp``, ``pp``; 0 on axes not named."""
    make_recorder: Callable[[], Recorder | None] = _cuda_recorder
    """Makes the recorder of a step; None if there is nothing to record."""
    _recorder: Recorder | None = field(default=None, init=False, repr=False)
    _step: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        steps: Any = self.profile_steps  # It often comes from a configuration file, so its type is unchecked.
        if (
            not isinstance(steps, Collection)
            or isinstance(steps, str)
            or not all(type(step) is int and step >= 0 for step in steps)
        ):
            raise ValueError(f"profile_steps {steps!r}: expected step numbers from 0, such as [0, 1]")
        if type(self.max_entries) is not int or self.max_entries < 1:
            raise ValueError(
                f"max_entries {self.max_entries!r}: expected a positive number of allocations and frees to record"
            )
        unknown = sorted(set(self.ranks) - {"dp", "cp", "tp", "pp"})
        if unknown:
            raise ValueError(f"ranks {', '.join(unknown)}: expected dp, cp, tp, pp as axes; leave others out")

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, **given: Any) -> "MemorySnapshots":
        """Makes snapshots from a section of a configuration.

        Args:
            config: ``{profile_steps: [0, 1], max_entries: 100000}``, also with ``directory``; None
                for no snapshots.
            given: the other fields.

        Raises:
            ValueError: A setting is unknown or does not fit; the message names it.
        """
        if config is None:
            return cls(profile_steps=(), **given)
        unknown = sorted(set(config) - {"profile_steps", "max_entries", "directory"})
        if unknown:
            raise ValueError(
                f"memory snapshots: {', '.join(unknown)}: expected profile_steps, max_entries, directory; "
                "leave other settings out"
            )
        return cls(**config, **given)

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """Records a step, if it is one of ``profile_steps``; a failing one too."""
        self.on_step_begin(number)
        try:
            yield
        except BaseException:
            self._finish(number, failed=True)
            raise
        self.on_step_end(number)

    def on_step_begin(self, number: int) -> None:
        """Starts recording a step of ``profile_steps``, unless another one is being recorded."""
        if number not in self.profile_steps or self._recorder is not None:
            return
        recorder = self.make_recorder()
        if recorder is None:
            warnings.warn(f"no memory snapshot of step {number}: CUDA is not available", RuntimeWarning, stacklevel=2)
            return
        recorder.start(self.max_entries)
        self._recorder, self._step = recorder, number

    def on_step_end(self, number: int) -> None:
        """Writes the file of the step that began; ignores other numbers."""
        self._finish(number, failed=False)

    def file(self, number: int, failed: bool = False) -> Path:
        """Returns the path of the snapshot of a step."""
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
