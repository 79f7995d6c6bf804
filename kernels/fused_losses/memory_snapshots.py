# SPDX-License-Identifier: Apache-2.0
"""Snapshots of CUDA memory over chosen training steps, one file for each rank.

View them at https://pytorch.org/memory_viz.
"""

import re
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fused_losses.memory_recording import (
    Recorder,
    Recording,
    check_writable,
    cuda_recorder,
    errors_as_warnings,
    file_stem,
    global_rank,
)

AXES = ("dp", "dp_replicate", "dp_shard", "fsdp", "cp", "sp", "tp", "pp", "ep", "etp", "edp", "efsdp")
"""Axes of coordinates, as Megatron-LM, torchtitan and AReaL call them; e stands for experts."""

SETTINGS = ("profile_steps", "max_entries", "directory", "profile_ranks")
"""Fields that a section of a configuration may have."""


@dataclass
class MemorySnapshots:
    """Records the memory of some training steps, like AReaL's ``memory_profiler``.

    Put ``with snapshots.step(n):`` around a step, or call ``on_step_begin(n)`` and
    ``on_step_end(n)``. Around anything else, call ``start(name)`` and ``stop()``.

    Every rank leaves its own file in ``directory``: ``step{n}_rank{r}.pickle``, or
    ``{name}_rank{r}.pickle``, with the coordinates of ``ranks`` after the rank, as in
    ``step0_rank3_dp1_tp1.pickle``. r is the global rank in torch.distributed when the file is
    written, or when recording began if the process group is gone; else the environment's ``RANK``;
    else 0. A file never replaces another: a second recording of a step, or a second run in the same
    directory, writes ``.._2.pickle``, a third ``.._3.pickle``.

    Recording always ends:

    - A step that raises inside ``step`` leaves a file ``.._failed.pickle``, which shows what an
      out-of-memory error ran into.
    - A recording whose end is missed, for example because an error skips ``on_step_end``, ends at
      the next ``on_step_begin`` or ``start``, or when the snapshots are garbage, or when the
      process exits. It leaves ``.._unfinished.pickle``, with a warning. ``close`` does the same
      without a warning. In a forked process the copy of a recording is left alone.

    Snapshots do not break training. If recording cannot start or its file cannot be written, a
    ``RuntimeWarning`` says why, recording stops, and training goes on. The warning comes before the
    step runs if there is no CUDA, if ``directory`` cannot be written, or if CUDA's memory is being
    recorded already.

    Raises:
        ValueError: A setting does not fit; the message names it.
    """

    profile_steps: Collection[int] = (0, 1)
    """Numbers of the steps to record, such as [0, 1] or range(10, 12)."""
    max_entries: int = 100_000
    """Number of allocations and frees to record; the oldest are dropped first."""
    directory: Path | str = "memory_snapshots"
    """Where the files go; created if missing."""
    ranks: Mapping[str, int] | DeviceMesh = field(default_factory=dict[str, int])
    """This rank's coordinates by axis, for the names of files, such as {"dp": 1, "ep": 0}. The axes
    must be among ``AXES``; a ``DeviceMesh`` may have any axes."""
    make_recorder: Callable[[], Recorder | None] = cuda_recorder
    """Returns the recorder of a step; None if there is nothing to record."""
    profile_ranks: Collection[int] | Callable[[int], bool] | None = None
    """Global ranks that record, or a function that says whether a rank does; None for all."""
    _place: str = field(default="", init=False, repr=False)
    _recording: Recording | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_numbers("profile_steps", self.profile_steps, "step numbers from 0, such as [0, 1]")
        if type(self.max_entries) is not int or self.max_entries < 1:
            raise ValueError(
                f"max_entries {self.max_entries!r}: expected a positive number of allocations and frees to record"
            )
        directory: Any = self.directory  # Settings often come from a configuration file, so their types are unchecked.
        if not isinstance(directory, str | PathLike) or not str(directory):
            raise ValueError(f"directory {directory!r}: expected the path of a folder")
        if self.profile_ranks is not None and not callable(self.profile_ranks):
            expected = "global ranks, such as [0], a function of a rank, or None for all ranks"
            _check_numbers("profile_ranks", self.profile_ranks, expected)
            if not self.profile_ranks:
                raise ValueError(f"profile_ranks {self.profile_ranks!r}: expected {expected}")
        self._place = "".join(f"_{axis}{place}" for axis, place in _coordinates(self.ranks).items())

    @classmethod
    def from_config(cls, config: object, **given: Any) -> "MemorySnapshots":
        """Makes snapshots from a section of a configuration.

        Args:
            config: ``{profile_steps: [0, 1], max_entries: 100000}``, also with ``directory`` and
                ``profile_ranks``: a mapping (OmegaConf's too), a dataclass (AReaL's too), or a
                pydantic model or msgspec struct. None for no steps; ``start`` still records.
            given: other fields, and fields that take precedence over those of config.

        Raises:
            ValueError: A setting is unknown or does not fit; the message names it.
        """
        settings: dict[str, Any] = {"profile_steps": ()} if config is None else _settings(config)
        for name in settings:
            if name not in SETTINGS:
                raise ValueError(
                    f"memory snapshots: unknown setting {name!r}; {_nearest(name, SETTINGS)}; leave other settings out"
                )
        return cls(**{**settings, **given})

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """Records a step if it is one of ``profile_steps``, even if it fails."""
        self.on_step_begin(number)
        try:
            yield
        except BaseException:
            self._end(f"step{number}", "_failed")
            raise
        self.on_step_end(number)

    def on_step_begin(self, number: int) -> None:
        """Starts recording a step of ``profile_steps``, and ends a step that was not ended.

        A recording that ``start`` began goes on; a step in it gets a warning and no file.
        """
        if self._recording is not None and not self._recording.by_hand:
            self._abandon()
        if number not in self.profile_steps or not self._records():
            return
        if self._recording is not None:
            warnings.warn(
                f"no memory snapshot of step {number}: {self._recording.said} is being recorded until stop()",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._begin(f"step{number}", f"step {number}", by_hand=False)

    def on_step_end(self, number: int) -> Path | None:
        """Writes the file of the step that began; ignores other numbers.

        Returns:
            The file; None if there is none.
        """
        return self._end(f"step{number}")

    def start(self, name: str) -> None:
        """Starts recording outside of numbered steps, and ends a recording that was not ended.

        Args:
            name: how the name of the file starts: letters, digits, ``_``, ``-`` and ``.``.

        Raises:
            ValueError: The name does not fit into the name of a file.
        """
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise ValueError(f"name {name!r}: expected letters, digits, '_', '-' and '.', as it starts a file's name")
        self._abandon()
        if self._records():
            self._begin(name, repr(name), by_hand=True)

    def stop(self) -> Path | None:
        """Writes the file of the recording that ``start`` began. Ignores other recordings.

        Returns:
            The file; None if there is none.
        """
        return self._end(None)

    def close(self) -> Path | None:
        """Ends whatever is being recorded. The snapshots can be used again.

        Returns:
            The file, ``.._unfinished.pickle``; None if there is none.
        """
        recording, self._recording = self._recording, None
        return recording.finish("_unfinished") if recording is not None else None

    def file(self, number: int, failed: bool = False) -> Path:
        """Returns the path of this rank's first snapshot of a step."""
        stem = file_stem(f"step{number}", global_rank(), self._place)
        return Path(self.directory) / f"{stem}{'_failed' if failed else ''}.pickle"

    def _records(self) -> bool:
        chosen = self.profile_ranks
        if chosen is None:
            return True
        return bool(chosen(global_rank())) if callable(chosen) else global_rank() in chosen

    def _begin(self, name: str, said: str, by_hand: bool) -> None:
        with errors_as_warnings(f"no memory snapshot of {said}"):
            recorder = self.make_recorder()
            if recorder is None:
                raise RuntimeError("CUDA is not available")
            check_writable(Path(self.directory))
            recorder.start(self.max_entries)
            self._recording = Recording(recorder, Path(self.directory), name, self._place, said, by_hand)
            self._recording.end_with(self)

    def _end(self, step: str | None, mark: str = "") -> Path | None:
        """Ends the recording of a step, or that of ``start`` if ``step`` is None.

        Ignores other recordings.
        """
        recording = self._recording
        if recording is None:
            return None
        recorded_step = None if recording.by_hand else recording.name
        if step != recorded_step:
            return None
        self._recording = None
        return recording.finish(mark)

    def _abandon(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.abandon()


def _check_numbers(name: str, numbers: Any, expected: str) -> None:
    if (
        not isinstance(numbers, Collection)
        or isinstance(numbers, str)
        or not all(type(number) is int and number >= 0 for number in numbers)
    ):
        raise ValueError(f"{name} {numbers!r}: expected {expected}")


def _coordinates(ranks: Any) -> Mapping[str, int]:
    """Returns the coordinates of this rank, checked."""
    if isinstance(ranks, DeviceMesh):
        names, place = ranks.mesh_dim_names, ranks.get_coordinate()
        if names is None:
            raise ValueError(f"ranks {ranks}: expected a mesh with mesh_dim_names")
        return dict(zip(names, place or (), strict=False))  # No coordinates: this rank is not in the mesh.
    if not isinstance(ranks, Mapping):
        raise ValueError(f"ranks {ranks!r}: expected coordinates by axis, such as {{'dp': 0}}, or a DeviceMesh")
    for axis, place in ranks.items():
        if axis not in AXES:
            raise ValueError(f"ranks: unknown axis {axis!r}; {_nearest(axis, AXES)}; leave others out")
        if type(place) is not int or place < 0:
            raise ValueError(f"ranks: {axis}={place!r}: expected this rank's coordinate, from 0")
    return ranks


def _settings(config: object) -> dict[str, Any]:
    """Returns the settings of a section by name."""
    if isinstance(config, Mapping):
        return dict(config)
    kind = type(config)
    if is_dataclass(kind):
        names: Iterable[str] = [one.name for one in fields(kind)]
    else:  # pydantic's and msgspec's names of their fields
        names = getattr(kind, "model_fields", None) or getattr(kind, "__struct_fields__", None) or ()
    if not names:
        raise ValueError(
            f"memory snapshots: {config!r}: expected a mapping, a dataclass, a pydantic model or a msgspec struct, "
            "or None for no steps"
        )
    return {name: getattr(config, name) for name in names}


def _nearest(name: object, known: Collection[str]) -> str:
    """Returns the end of a message: the nearest spelling, if any, and what was expected."""
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)  # 0.5: 'steps' is close to 'profile_steps'
    question = f"did you mean {close[0]!r}? " if close else ""
    return f"{question}expected {', '.join(known)}"
