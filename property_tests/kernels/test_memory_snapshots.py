# SPDX-License-Identifier: Apache-2.0
"""Tests of memory snapshots, with a recorder that replaces that of CUDA.

With a GPU, CUDA's own recorder is tested too.
"""

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fused_losses import MemorySnapshots
from fused_losses.memory_recording import CudaRecorder

ROOT = Path(__file__).parents[2]


class Recorder:
    """Logs the calls of its methods; those named in ``failing`` raise after they are logged."""

    def __init__(self, *failing: str, error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self.failing = failing
        self.error = error or RuntimeError("out of luck")

    def start(self, max_entries: int) -> None:
        self.log(f"start {max_entries}")

    def dump(self, file: Path) -> None:
        file.write_text("half of")
        self.log(f"dump {file.name}")
        file.write_text(self.calls[-1])

    def stop(self) -> None:
        self.log("stop")

    def log(self, call: str) -> None:
        self.calls.append(call)
        if call.split()[0] in self.failing:
            raise self.error


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


Make = Callable[..., MemorySnapshots]


@pytest.fixture
def make(recorder: Recorder, tmp_path: Path) -> Make:
    def make(**given: Any) -> MemorySnapshots:
        return MemorySnapshots(**{"directory": tmp_path / "snapshots", "make_recorder": lambda: recorder, **given})

    return make


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], list[str]]:
    return lambda: sorted(file.name for file in (tmp_path / "snapshots").iterdir())


Files = Callable[[], list[str]]


@pytest.fixture
def group() -> Iterator[None]:
    """This process is rank 5 of a process group of 8, of which the others need not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Steps and their files.


def test_each_step_has_its_file_which_names_step_rank_and_coordinates(
    make: Make, recorder: Recorder, files: Files
) -> None:
    memory = make(profile_steps=[0, 1, 3], max_entries=50, ranks={"dp": 1, "cp": 2, "ep": 3})
    for step in range(5):
        with memory.step(step):
            recorder.calls.append(f"train {step}")
    names = [f"step{step}_rank0_dp1_cp2_ep3.pickle" for step in (0, 1, 3)]
    assert recorder.calls == [
        *("start 50", "train 0", f"dump {names[0]}", "stop"),
        *("start 50", "train 1", f"dump {names[1]}", "stop", "train 2"),
        *("start 50", "train 3", f"dump {names[2]}", "stop", "train 4"),
    ]
    assert files() == names


def test_callbacks_return_the_file(make: Make, recorder: Recorder) -> None:
    memory = make(profile_steps=range(1, 2))
    returned: list[Path | None] = []
    for step in range(3):
        memory.on_step_begin(step)
        returned += [memory.on_step_end(step + 5), memory.on_step_end(step)]  # No step of the first number has begun.
    assert recorder.calls == ["start 100000", "dump step1_rank0.pickle", "stop"]
    assert returned == [None, None, None, memory.file(1), None, None]


def test_a_step_that_fails_leaves_its_file_and_its_error(make: Make, recorder: Recorder) -> None:
    memory = make()
    with pytest.raises(torch.OutOfMemoryError), memory.step(0):
        raise torch.OutOfMemoryError("out of memory")
    assert recorder.calls[1:] == ["dump step0_rank0_failed.pickle", "stop"]
    assert memory.file(0, failed=True).exists()


def test_a_file_never_replaces_another(make: Make, files: Files) -> None:
    """A step comes twice in one run, as in evaluation, and again in a second run."""
    for _run in range(2):
        memory = make()
        for step in (0, 0, 1):
            memory.on_step_begin(step)
            file = memory.on_step_end(step)
            assert file is not None
            assert file.read_text() == f"dump {file.name}"
        with pytest.raises(KeyError), memory.step(1):
            raise KeyError
    assert files() == [
        *("step0_rank0.pickle", *(f"step0_rank0_{n}.pickle" for n in (2, 3, 4))),
        *("step1_rank0.pickle", "step1_rank0_2.pickle", "step1_rank0_failed.pickle", "step1_rank0_failed_2.pickle"),
    ]


# Ranks.


@pytest.mark.parametrize(("rank", "shown"), [("3", 3), ("12", 12), ("", 0), ("none", 0), (None, 0)])
def test_the_rank_of_the_environment(make: Make, monkeypatch: pytest.MonkeyPatch, rank: str | None, shown: int) -> None:
    memory = make()
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    memory.on_step_begin(0)
    file = memory.on_step_end(0)
    assert file is not None
    assert file.name == f"step0_rank{shown}.pickle"
    assert memory.file(0) == file


def test_the_rank_in_the_process_group_goes_before_that_of_the_environment(
    make: Make, monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert make().file(0).name == "step0_rank5.pickle"


def test_the_rank_is_read_when_the_file_is_written(make: Make, request: pytest.FixtureRequest) -> None:
    memory = make()
    memory.on_step_begin(0)
    request.getfixturevalue("group")
    file = memory.on_step_end(0)
    assert file is not None
    assert file.name == "step0_rank5.pickle"


def test_a_process_group_that_is_gone_still_gives_the_rank(make: Make, group: None, files: Files) -> None:
    memory = make()
    memory.on_step_begin(0)
    dist.destroy_process_group()
    memory.on_step_end(0)
    assert files() == ["step0_rank5.pickle"]


@pytest.mark.parametrize(
    ("chosen", "recorded"),
    [(None, [0, 1, 2]), ((0,), [0]), ([1, 2, 9], [1, 2]), (lambda rank: rank % 2 == 1, [1])],
)
def test_which_ranks_record(
    make: Make, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, chosen: Any, recorded: list[int]
) -> None:
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        memory = make(profile_ranks=chosen)
        with memory.step(0):
            pass
        memory.start("more")
        memory.stop()
    dumps = [call for call in recorder.calls if call.startswith("dump")]
    assert dumps == [f"dump {name}_rank{rank}.pickle" for rank in recorded for name in ("step0", "more")]


@pytest.mark.parametrize(
    "axis", ["dp", "dp_replicate", "dp_shard", "fsdp", "cp", "sp", "tp", "pp", "ep", "etp", "edp", "efsdp"]
)
def test_axes(axis: str) -> None:
    assert MemorySnapshots(ranks={axis: 2}).file(0).name == f"step0_rank0_{axis}2.pickle"


def test_a_device_mesh_gives_the_coordinates(group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    names = [MemorySnapshots(ranks=ranks).file(0).name for ranks in (mesh, mesh["tp"])]
    assert names == ["step0_rank5_dp1_tp1.pickle", "step0_rank5_tp1.pickle"]
    with pytest.raises(ValueError, match=r"ranks DeviceMesh.*: expected a mesh with mesh_dim_names"):
        MemorySnapshots(ranks=init_device_mesh("cpu", (8,)))


PROCESS = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from fused_losses import MemorySnapshots

hows, rank, top = sys.argv[1].split(), int(sys.argv[2]), Path(sys.argv[3])

class Recorder:
    def start(self, max_entries): pass
    def dump(self, file): file.write_text(f"rank {rank}")
    def stop(self): print("stopped")

for how in hows:
    folder = top / how
    folder.mkdir(exist_ok=True)
    snapshots = {"directory": folder / "snapshots", "make_recorder": Recorder}
    if how == "RANK":
        os.environ["RANK"] = str(rank)
    if how in ("group", "mesh"):
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    if how == "mesh":
        snapshots["ranks"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    memory = MemorySnapshots(**snapshots)
    memory.on_step_begin(0)
    if how == "error":
        raise SystemError("out of luck")
    if dist.is_initialized():
        dist.barrier()
    memory.on_step_end(0)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.pop("RANK", None)
"""


def run(hows: str, ranks: int, folder: Path) -> list[tuple[int, str, str]]:
    """Runs PROCESS as each rank at once; returns exit codes, standard output and error.

    Each way of ``hows`` has a folder of its own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, hows, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


NAMES = {
    "RANK": ["step0_rank0.pickle", "step0_rank1.pickle"],
    "group": ["step0_rank0.pickle", "step0_rank1.pickle"],
    "mesh": ["step0_rank0_dp0_ep0.pickle", "step0_rank1_dp0_ep1.pickle"],
    "nothing": ["step0_rank0.pickle", "step0_rank0_2.pickle"],  # No process knows its rank.
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two processes left, which take long to import torch."""
    folder = tmp_path_factory.mktemp("left")
    for code, _, error in run(" ".join(NAMES), 2, folder):
        assert code == 0, error
    return folder


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("how", NAMES)
def test_each_process_leaves_its_own_file(left: Path, how: str) -> None:
    names = NAMES[how]
    written = {file.name: file.read_text() for file in (left / how / "snapshots").iterdir()}
    assert sorted(written) == sorted(names)
    assert sorted(written.values()) == ["rank 0", "rank 1"]
    if how != "nothing":
        assert [written[name] for name in names] == ["rank 0", "rank 1"]


# Ends that are missed.


def test_the_next_step_ends_one_that_was_not_ended(make: Make, recorder: Recorder) -> None:
    memory = make(profile_steps=[0, 1])
    memory.on_step_begin(0)
    message = r"^step 0: .*missing call of on_step_end left memory recording on.*step0_rank0_unfinished\.pickle$"
    with pytest.warns(RuntimeWarning, match=message):
        memory.on_step_begin(1)
    memory.on_step_end(0)  # It comes too late.
    assert recorder.calls == ["start 100000", "dump step0_rank0_unfinished.pickle", "stop", "start 100000"]
    with pytest.warns(RuntimeWarning, match=r"^step 1: .*step1_rank0_unfinished\.pickle$"):
        memory.on_step_begin(2)
    assert recorder.calls[4:] == ["dump step1_rank0_unfinished.pickle", "stop"]
    assert memory.on_step_end(1) is None


def test_a_step_that_is_tried_again_after_an_error(make: Make, files: Files) -> None:
    memory = make()
    memory.on_step_begin(0)
    with pytest.warns(RuntimeWarning, match="^step 0: "):
        memory.on_step_begin(0)
    memory.on_step_end(0)
    assert files() == ["step0_rank0.pickle", "step0_rank0_unfinished.pickle"]


@pytest.mark.parametrize("begin", [lambda memory: memory.on_step_begin(0), lambda memory: memory.start("a")])
def test_garbage_does_not_record(make: Make, recorder: Recorder, begin: Callable[[MemorySnapshots], None]) -> None:
    kept = [make()]
    begin(kept[0])
    assert recorder.calls == ["start 100000"]
    with pytest.warns(RuntimeWarning, match=r"left memory recording on; it ends now, with .*_unfinished\.pickle"):
        kept.clear()
    assert recorder.calls[-1] == "stop"


def test_what_has_ended_does_not_end_again(make: Make, recorder: Recorder) -> None:
    memory = make()
    memory.on_step_begin(0)
    memory.on_step_end(0)
    calls = list(recorder.calls)
    del memory
    gc.collect()
    assert recorder.calls == calls


def test_an_error_between_begin_and_end_leaves_a_file_at_exit(tmp_path: Path) -> None:
    ((code, output, error),) = run("error", 1, tmp_path)
    assert code == 1
    assert output == "stopped\n"
    assert "SystemError: out of luck" in error
    assert "RuntimeWarning: step 0: an error or a missing call of on_step_end left memory recording on" in error
    assert [file.name for file in (tmp_path / "error/snapshots").iterdir()] == ["step0_rank0_unfinished.pickle"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_a_forked_process_leaves_the_recording_alone(make: Make, files: Files, recorder: Recorder) -> None:
    kept = [make()]
    kept[0].on_step_begin(0)
    child = multiprocessing.get_context("fork").Process(target=kept.clear)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert files() == []
    kept[0].on_step_end(0)
    assert files() == ["step0_rank0.pickle"]


def test_close_ends_a_recording_without_a_warning(make: Make, recorder: Recorder) -> None:
    memory = make()
    assert memory.close() is None
    memory.on_step_begin(0)
    file = memory.close()
    assert recorder.calls == ["start 100000", "dump step0_rank0_unfinished.pickle", "stop"]
    assert file is not None
    assert file.name == "step0_rank0_unfinished.pickle"
    assert (memory.close(), memory.on_step_end(0)) == (None, None)
    with memory.step(1):
        pass
    assert recorder.calls[3:] == ["start 100000", "dump step1_rank0.pickle", "stop"]


# By hand.


def test_by_hand(make: Make, recorder: Recorder) -> None:
    memory = make(ranks={"tp": 1}, max_entries=7)
    memory.start("warm-up_1.5")
    memory.on_step_end(0)
    file = memory.stop()
    assert recorder.calls == ["start 7", "dump warm-up_1.5_rank0_tp1.pickle", "stop"]
    assert file is not None
    assert file.exists()
    assert memory.stop() is None


def test_a_recording_by_hand_goes_on_over_steps(make: Make, recorder: Recorder) -> None:
    memory = make(profile_steps=[1])
    memory.start("step1")  # The name of a step's file does not make it one.
    with memory.step(0):
        pass
    with pytest.warns(RuntimeWarning, match=r"^no memory snapshot of step 1: 'step1' is being recorded until stop"):
        memory.on_step_begin(1)
    memory.on_step_end(1)
    assert recorder.calls == ["start 100000"]
    memory.stop()
    with memory.step(1):
        memory.stop()
        assert recorder.calls[-1] == "start 100000"
    assert recorder.calls[-2:] == ["dump step1_rank0_2.pickle", "stop"]


@pytest.mark.parametrize(
    ("begin", "said", "file"),
    [
        (lambda memory: memory.on_step_begin(0), "step 0: .*call of on_step_end", "step0_rank0_unfinished"),
        (lambda memory: memory.start("a"), r"'a': .*call of stop\(\)", "a_rank0_unfinished"),
    ],
)
def test_start_ends_what_was_not_ended(
    make: Make, recorder: Recorder, begin: Callable[[MemorySnapshots], None], said: str, file: str
) -> None:
    memory = make()
    begin(memory)
    with pytest.warns(RuntimeWarning, match=rf"^{said}.*{file}\.pickle$"):
        memory.start("b")
    memory.stop()
    dumps = [call for call in recorder.calls if call.startswith("dump")]
    assert dumps == [f"dump {file}.pickle", "dump b_rank0.pickle"]


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "é", "a\n", "."])
def test_names_that_fit_into_no_file_name(make: Make, name: str) -> None:
    with pytest.raises(ValueError, match=r"^name .*: expected letters, digits, '_', '-' and '.'"):
        make().start(name)


# Training goes on without a snapshot.


def test_a_directory_that_cannot_be_written_is_reported_before_the_step(
    make: Make, recorder: Recorder, tmp_path: Path
) -> None:
    (tmp_path / "snapshots").write_text("in the way")
    memory = make()
    with pytest.warns(RuntimeWarning, match=r"^no memory snapshot of step 0: .*File exists.*snapshots"):
        memory.on_step_begin(0)
    assert memory.on_step_end(0) is None
    assert recorder.calls == []


def test_a_directory_is_tried_with_a_file_of_no_trace(
    make: Make, monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    """As root, every directory can be written, so the failure is planted."""

    def refuse(**given: Path) -> None:
        raise PermissionError(13, "Permission denied", str(given["dir"]))

    memory = make()
    memory.on_step_begin(0)
    assert files() == []
    memory.on_step_end(0)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.warns(RuntimeWarning, match="no memory snapshot of step 1: .*Permission denied"):
        memory.on_step_begin(1)
    assert memory.on_step_end(1) is None


@pytest.mark.parametrize(
    ("failing", "message", "calls", "left"),
    [
        ("start", "no memory snapshot of step 0: out of luck", ["start"], []),
        ("dump", "no memory snapshot of step 0: out of luck", ["start", "dump", "stop"], []),
        ("stop", "memory may still be recorded after step 0: out of luck", ["start", "dump", "stop"], ["step0_rank0"]),
    ],
)
def test_a_recorder_that_fails_does_not_break_training(
    make: Make, files: Files, failing: str, message: str, calls: list[str], left: list[str]
) -> None:
    recorder = Recorder(failing)
    trained = False
    with (
        pytest.warns(RuntimeWarning, match=f"^{message}$"),
        make(make_recorder=lambda: recorder).step(0),
    ):
        trained = True
    assert trained
    assert [call.split()[0] for call in recorder.calls] == calls
    assert files() == [f"{name}.pickle" for name in left]


def test_an_interrupted_dump_stops_recording_and_leaves_no_file(make: Make, files: Files) -> None:
    recorder = Recorder("dump", error=KeyboardInterrupt())
    memory = make(make_recorder=lambda: recorder)
    memory.on_step_begin(0)
    with pytest.raises(KeyboardInterrupt):
        memory.on_step_end(0)
    assert recorder.calls[-1] == "stop"
    assert files() == []


def test_a_failing_dump_does_not_hide_the_error_of_the_step(make: Make) -> None:
    recorder = Recorder("dump")
    with (
        pytest.warns(RuntimeWarning, match="no memory snapshot of step 0"),
        pytest.raises(torch.OutOfMemoryError),
        make(make_recorder=lambda: recorder).step(0),
    ):
        raise torch.OutOfMemoryError("out of memory")
    assert recorder.calls[-1] == "stop"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_it_warns_and_trains_on(tmp_path: Path) -> None:
    memory = MemorySnapshots(directory=tmp_path)
    with pytest.warns(RuntimeWarning, match="^no memory snapshot of step 0: CUDA is not available$"), memory.step(0):
        trained = True
    assert trained
    assert not list(tmp_path.iterdir())


def test_a_recording_of_someone_else_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: pytest.fail("it was changed"))
    with pytest.warns(RuntimeWarning, match="step 0: CUDA memory is being recorded already; end that"):
        make(make_recorder=CudaRecorder).on_step_begin(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_with_cuda(tmp_path: Path) -> None:
    memory = MemorySnapshots(directory=tmp_path)
    for step in range(2):
        with memory.step(step):
            torch.ones(1000, device="cuda")
            with pytest.warns(RuntimeWarning, match="is being recorded already"):
                MemorySnapshots(directory=tmp_path).start("second")
    assert not torch._C._cuda_isHistoryEnabled()
    for step in range(2):
        assert pickle.loads(memory.file(step).read_bytes())["device_traces"]


# Settings.


@dataclass
class Areal:
    """AReaL's MemoryProfilerConfig."""

    profile_steps: list[int] = field(default_factory=lambda: [3])
    max_entries: int = 7


@dataclass(slots=True)
class Slots:
    profile_steps: tuple[int, ...] = (3,)
    max_entries: int = 7


class Struct(msgspec.Struct):
    profile_steps: list[int] = msgspec.field(default_factory=lambda: [3])
    max_entries: int = 7


class Model:
    """Pydantic's models name their fields so; the tests do not need pydantic."""

    model_fields = {"profile_steps": ..., "max_entries": ...}  # noqa: RUF012

    def __init__(self) -> None:
        self.profile_steps, self.max_entries = [3], 7


SECTIONS = [
    {"profile_steps": [3], "max_entries": 7},
    UserDict({"profile_steps": [3], "max_entries": 7}),  # A mapping that is no dict, as OmegaConf's is.
    *(Areal(), Slots(), Struct(), Model()),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: type(section).__name__)
def test_sections_of_configurations(section: object) -> None:
    memory = MemorySnapshots.from_config(section)
    assert (list(memory.profile_steps), memory.max_entries) == ([3], 7)
    memory = MemorySnapshots.from_config(section, max_entries=9, ranks={"dp": 1})
    assert (list(memory.profile_steps), memory.max_entries, memory.ranks) == ([3], 9, {"dp": 1})


def test_every_setting() -> None:
    settings = {"profile_steps": [3], "max_entries": 7, "directory": "elsewhere", "profile_ranks": [0]}
    assert MemorySnapshots.from_config(settings) == MemorySnapshots(**settings)
    assert MemorySnapshots.from_config({}) == MemorySnapshots()


def test_without_a_section_no_step_is_recorded(make: Make, recorder: Recorder, tmp_path: Path) -> None:
    memory = MemorySnapshots.from_config(None, make_recorder=lambda: recorder, directory=tmp_path)
    with memory.step(0):
        pass
    assert recorder.calls == []
    memory.start("a")
    assert memory.stop() == tmp_path / "a_rank0.pickle"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profile_steps": "01"}, "profile_steps '01': expected step numbers from 0"),
        ({"profile_steps": [-1]}, r"profile_steps \[-1\]: expected step numbers from 0"),
        ({"profile_steps": [True]}, r"profile_steps \[True\]: expected step numbers from 0"),
        ({"profile_steps": 3}, "profile_steps 3: expected step numbers from 0"),
        ({"profile_steps": None}, "profile_steps None: expected step numbers from 0"),
        ({"max_entries": 0}, "max_entries 0: expected a positive number"),
        ({"max_entries": 1e5}, "max_entries 100000.0: expected a positive number"),
        ({"directory": None}, "directory None: expected the path of a folder"),
        ({"directory": ""}, "directory '': expected the path of a folder"),
        ({"profile_ranks": 0}, "profile_ranks 0: expected global ranks, such as"),
        ({"profile_ranks": ["0"]}, r"profile_ranks \['0'\]: expected global ranks, such as"),
        ({"profile_ranks": []}, r"profile_ranks \[\]: expected global ranks.* or None for all ranks"),
        (
            {"ranks": {"expert": 1}},
            "ranks: unknown axis 'expert'; did you mean 'ep'[?] expected dp, .*, ep, etp, .*; leave others out",
        ),
        ({"ranks": {"x": 1}}, "ranks: unknown axis 'x'; expected dp, .*; leave others out"),
        ({"ranks": {"dp_shrad": 1}}, "unknown axis 'dp_shrad'; did you mean 'dp_shard'[?] expected dp, "),
        ({"ranks": {"dp": -1}}, "ranks: dp=-1: expected this rank's coordinate, from 0"),
        ({"ranks": {"dp": None}}, "ranks: dp=None: expected this rank's coordinate"),
        ({"ranks": 3}, "ranks 3: expected coordinates by axis, such as {'dp': 0}, or a DeviceMesh"),
    ],
)
def test_bad_settings_raise_errors_that_name_them(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySnapshots(**given)
    if "ranks" not in given:
        with pytest.raises(ValueError, match=message):
            MemorySnapshots.from_config(given)


@dataclass
class Misspelt:
    profile_step: tuple[int, ...] = (0,)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"steps": [0]},
            "unknown setting 'steps'; did you mean 'profile_steps'[?] expected profile_steps, max_entries",
        ),
        (Misspelt(), "unknown setting 'profile_step'; did you mean 'profile_steps'[?]"),
        ({"memory_snapshot_max_entries": 3}, "did you mean 'max_entries'[?]"),
        ({"enabled": True}, "unknown setting 'enabled'; expected profile_steps, .*; leave other settings out"),
        ({"ranks": {}}, "unknown setting 'ranks'"),  # One configuration is for all ranks.
        (["profile_steps"], r"\['profile_steps'\]: expected a mapping, a dataclass, .* or None"),
        (Areal, "expected a mapping, a dataclass"),
        (3, "3: expected a mapping"),
    ],
)
def test_sections_that_do_not_fit(section: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemorySnapshots.from_config(section)
