# SPDX-License-Identifier: Apache-2.0
"""One recording of CUDA memory on one rank, from its start to its file."""

import os
import tempfile
import warnings
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Recorder(Protocol):
    """Records the history of memory, as ``torch.cuda.memory`` does."""

    def start(self, max_entries: int) -> None: ...
    def dump(self, file: Path) -> None: ...
    def stop(self) -> None: ...


class CudaRecorder:
    """Records with ``torch.cuda.memory``, which has one history for the whole process."""

    def start(self, max_entries: int) -> None:
        if torch._C._cuda_isHistoryEnabled():
            raise RuntimeError("CUDA memory is being recorded already; end that recording first")
        torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def dump(self, file: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(file))

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)


def cuda_recorder() -> Recorder | None:
    """Returns a recorder of CUDA's memory; None without CUDA."""
    return CudaRecorder() if torch.cuda.is_available() else None


def global_rank() -> int:
    """Returns the rank in the default process group; else ``RANK`` of the environment; else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


@contextmanager
def errors_as_warnings(message: str) -> Generator[None]:
    """Turns errors into warnings, because training must not end because a snapshot failed."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{message}: {str(error) or type(error).__name__}", RuntimeWarning, stacklevel=3)


def check_writable(directory: Path) -> None:
    """Makes a directory if it is missing, and tries to make a temporary file in it.

    Raises:
        OSError: Files cannot be written there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def new_file(directory: Path, stem: str) -> Path:
    """Makes an empty file ``STEM.pickle``, or ``STEM_2.pickle``, .. if that exists already.

    Creating the file claims its name, so that no other process or later attempt takes it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for attempt in count(1):
        file = directory / f"{stem}{'' if attempt == 1 else f'_{attempt}'}.pickle"
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            continue
        return file
    raise AssertionError("there is no last attempt")


@dataclass(eq=False)
class Recording:
    """A recording that is under way. It ends at the latest with its owner or the process."""

    recorder: Recorder
    """The recorder, which has been started."""
    directory: Path
    """Where the file goes."""
    name: str
    """The start of the file's name."""
    place: str
    """The coordinates of this rank, for the file's name."""
    said: str
    """What is recorded, for messages."""
    by_hand: bool
    """True if ``stop`` ends it, False if ``on_step_end`` does."""
    _rank: int = field(default_factory=global_rank, init=False)
    _process: int = field(default_factory=os.getpid, init=False)
    _finalizer: "weakref.finalize[Any, Any] | None" = field(default=None, init=False, repr=False)

    def end_with(self, owner: object) -> None:
        """Ends the recording when its owner is garbage, and when the process exits."""
        self._finalizer = weakref.finalize(owner, self._abandon_in_this_process)

    def finish(self, mark: str = "") -> Path | None:
        """Writes the file, and then stops recording, even if the file could not be written.

        Returns:
            The file, or None with a warning if it could not be written.
        """
        if self._finalizer is not None:
            self._finalizer.detach()
        try:
            with errors_as_warnings(f"no memory snapshot of {self.said}"):
                return self._write(mark)
        finally:
            with errors_as_warnings(f"memory may still be recorded after {self.said}"):
                self.recorder.stop()
        return None

    def abandon(self) -> None:
        """Ends a recording whose end was missed, and warns of it."""
        file = self.finish("_unfinished")
        ends = "stop()" if self.by_hand else "on_step_end"
        warnings.warn(
            f"{self.said}: an error or a missing call of {ends} left memory recording on; "
            f"it ends now, with {file or 'no file'}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _abandon_in_this_process(self) -> None:
        # A forked process has a copy of this object, but no CUDA, and its parent still records.
        if os.getpid() == self._process:
            self.abandon()

    def _write(self, mark: str) -> Path:
        # If the process group is gone already, as at exit, the rank at the start is still known.
        rank = global_rank() if dist.is_available() and dist.is_initialized() else self._rank
        file = new_file(self.directory, f"{file_stem(self.name, rank, self.place)}{mark}")
        try:
            self.recorder.dump(file)
        except BaseException:
            file.unlink(missing_ok=True)  # No viewer opens half a snapshot.
            raise
        return file


def file_stem(name: str, rank: int, place: str) -> str:
    """Returns ``step0_rank3_dp1_tp1``: what is recorded, the global rank, and its coordinates."""
    return f"{name}_rank{rank}{place}"
