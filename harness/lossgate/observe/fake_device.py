# SPDX-License-Identifier: Apache-2.0
"""An accelerator that is none, for machines without one: its tensors have only shapes and dtypes.

Two things raise on it that are slow or wrong on a GPU, and that no CPU shows: an operation on
tensors of several devices, and an operation that needs a value on the host, such as ``.item()``,
``if tensor:`` or a boolean index. On a GPU the host waits there for the device.

Not seen are a value that is copied with ``.cpu()`` and not used, an index on the CPU, which a GPU
copies to itself, and a scalar on the CPU, which torch lets meet any device.

The device is registered once for a process and stays, so all is done in a child process.
"""

import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from signal import SIGKILL
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from lossgate.base.layout import AXES, Layout
from lossgate.cases.case import Case
from lossgate.worlds.base import RankContext, T, Task
from lossgate.worlds.running import running

DEVICE = "sim"
Kind = Literal["mixed devices", "waits", "other"]
_PATIENCE = 60.0
"""Seconds after which the child is taken to hang."""
_MOST_CPU_SECONDS = 10
"""Its processor time before that: on a busy machine it has few of the seconds."""
HUNG, DIED = "it did not return in time", "its process died"
_COMPILER, _NO_COMPILER = "torch._dynamo", "it needs torch's compiler"
_NEEDED = "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"
"""What fake tensors need, and each child would load."""
_OWN = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class KernelRaised:
    """What a kernel raised on the fake device."""

    kind: Kind
    message: str
    place: str
    """The line of the kernel, as ``file.py:12``."""


def has_fake_device() -> bool:
    """Returns whether a kernel can be run on a fake device here: in a child that is forked, and
    that has no process groups yet.
    """
    return sys.platform == "linux" and not dist.is_initialized()


def raised_on_fake_device(case: Case) -> KernelRaised | None:
    """Runs a case on the last rank of its layout, on a fake device; returns what that raised."""
    _ = case.placed.batch, case.placed.partition.token_shards  # made of real tensors, before any fake ones

    def run(context: RankContext) -> object:
        return Case(case.candidate, case.problem, OneRank(context), case.bound).ranks

    return raised_in_child(case.problem.layout, run)


def raised_in_child(layout: Layout, run: Callable[[RankContext], object]) -> KernelRaised | None:
    """Forks a process in which the device is registered, and calls a function there.

    Args:
        layout: the function is given the context of its last rank.
        run: what is called, outside of ``fake_device``.

    Returns:
        What it raised; a child that dies or hangs raised something else.
    """
    for module in _NEEDED:
        importlib.import_module(module)
    found = _answer_of_child(layout, run)
    if found is not None and found.message == _NO_COMPILER:
        importlib.import_module(_COMPILER)  # here, so that no other child loads it
        found = _answer_of_child(layout, run)
    return found


def _answer_of_child(layout: Layout, run: Callable[[RankContext], object]) -> KernelRaised | None:
    """Does what ``raised_in_child`` does, once, with torch's compiler only if it is loaded."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(lambda: _raised(layout, run), reader, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as answer:
            there, _, _ = select([answer], [], [], _PATIENCE)
            return pickle.load(answer) if there else KernelRaised("other", HUNG, "")
    except (EOFError, pickle.UnpicklingError):
        return KernelRaised("other", DIED, "")
    finally:
        os.kill(child, SIGKILL)
        os.waitpid(child, 0)


def _answer(give: Callable[[], KernelRaised | None], reader: int, writer: int) -> None:
    """Answers in the child, and ends it without what Python does at the end of a process."""
    try:
        from resource import RLIMIT_CPU, setrlimit  # Windows has none, and no such child

        os.close(reader)
        setrlimit(RLIMIT_CPU, (_MOST_CPU_SECONDS, _MOST_CPU_SECONDS))
        _quieten()
        torch.set_num_threads(1)  # OpenMP's other threads stayed in the parent, and would be waited for
        found = give()
        with open(writer, "wb") as answer:
            pickle.dump(found, answer)
    finally:
        os._exit(0)


def _quieten() -> None:
    """Lets this process write nothing: what a kernel can't do on a fake device, torch logs."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")  # what these were may write elsewhere


def _raised(layout: Layout, run: Callable[[RankContext], object]) -> KernelRaised | None:
    """Calls a function in this process, and returns what it raised."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    _register()
    try:
        with _last_rank(layout) as context:
            _put_off_the_compiler()  # process groups look whether it is loaded
            run(context)
    except _CompilerIsNeeded:
        return KernelRaised("other", _NO_COMPILER, "")
    except Exception as error:  # whatever a kernel raises is an answer
        waits = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        mixed = type(error).__name__ == "FakeTensorDeviceMismatchError"
        kind: Kind = "waits" if waits else "mixed devices" if mixed else "other"
        message = f"{error.func}" if waits else str(error).splitlines()[0] if str(error) else type(error).__name__
        return KernelRaised(kind, message, _place(error))
    return None


def _register() -> None:
    """Registers the device in this process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(DEVICE)
    backend: Any = getattr(torch, DEVICE)
    backend.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # torch.autocast asks


@contextmanager
def fake_device() -> Generator[None]:
    """Makes every tensor a fake one, those on the CPU too."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    class FakeDevice(FakeTensorMode):
        avoid_device_init = True  # pyright: ignore[reportAssignmentType]  # there is nothing to initialise

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
                if any(one.device.type == DEVICE for one in tensors):
                    raise
                raise _OnHost(f"{func} needs values of a tensor on the CPU, which is a fake one here") from None

    # A problem is made of real tensors. Torch has no thread for a device that is registered late.
    with torch.autograd.set_multithreading_enabled(False), FakeDevice(allow_non_fake_inputs=True):
        yield


class _CompilerIsNeeded(BaseException):
    """Something of torch's compiler is used for which ``_NotLoaded`` does not stand. It is no
    ``Exception``, so that a kernel that catches those does not go on without.
    """


class _NotLoaded(ModuleType):
    """Stands for a module of torch's compiler, with what fake tensors use of it."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and inspect ask for what need not be there
            raise AttributeError(name)
        raise _CompilerIsNeeded


class _Source:
    """Where a shape comes from, for the compiler, if it is a symbol. On the fake device none is."""

    def __init__(self, *_: object) -> None:
        pass


def _not_compiled(function: Any = None, *_: object, **__: object) -> Any:
    """Stands for ``torch._dynamo.disable`` of a function, which nothing compiles."""
    if function is None:
        raise _CompilerIsNeeded
    return function


def _put_off_the_compiler() -> None:
    """Lets fake tensors work in this child without torch's compiler: it takes a second to load, and
    nothing is compiled for them.
    """
    if _COMPILER in sys.modules:
        return
    sources = dict.fromkeys(("AttrSource", "ConstantSource", "RandomValueSource"), _Source)
    source = _NotLoaded(f"{_COMPILER}.source", **sources)
    where = [str(Path(torch.__file__).parent / "_dynamo")]  # its settings are found there
    package = _NotLoaded(_COMPILER, __path__=where, source=source, disable=_not_compiled)
    utils = _NotLoaded("torch._inductor.utils", device_supports_fp64=lambda _: True)
    sys.modules.update({module.__name__: module for module in (package, source, utils)})


class _OnHost(Exception):
    """A value on the host is needed that is there, but that a fake tensor does not have."""


class OneRank:
    """A world of which only one rank runs, on the fake device."""

    def __init__(self, context: RankContext) -> None:
        self.layout, self._context, self.repeatable = context.layout, context, True

    def run(self, task: Task[T], *, order: str = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        with fake_device(), running(lambda: self._context.mesh):
            return [task(self._context)]

    def close(self) -> None:
        """Does nothing."""


@contextmanager
def _last_rank(layout: Layout) -> Generator[RankContext]:
    """Gives the context of the last rank. Collectives return without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = layout.ranks - 1
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    ranks = torch.arange(layout.ranks).view(*layout.sizes.values())
    at = list(layout.coordinate(rank).values())
    along = [ranks[tuple(slice(None) if i == axis else at[i] for i in range(len(AXES)))] for axis in range(len(AXES))]
    groups: list[Any] = [dist.new_group(members.tolist(), backend="fake") for members in along]
    mesh = DeviceMesh.from_group(groups, DEVICE, ranks, mesh_dim_names=AXES)
    yield RankContext(rank, layout, mesh, torch.device(DEVICE))
    dist.destroy_process_group()


def _place(error: BaseException) -> str:
    """Returns the last line that is neither torch's nor lossgate's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_OWN)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
