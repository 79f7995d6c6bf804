# SPDX-License-Identifier: Apache-2.0
"""An accelerator that does not exist, for machines without one: its tensors have no values.

Two things raise on it that are slow or wrong on a GPU and that no CPU shows: an operation on
tensors of several devices, and an operation that needs a value on the host, such as ``.item()``,
``if tensor:`` or a boolean index. On a GPU the host waits there for the device.

Three things are not seen: a value that is copied with ``.cpu()`` and not used, an index on the CPU,
which a GPU copies to itself, and a scalar on the CPU, which torch combines with any device.

Torch registers a device for the rest of a process, so a kernel runs on this one in a child process.
The file has three parts: the child, the device there, and the one rank that runs on it.
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
from lossgate.worlds.base import RankContext, T, Task, ranks_along
from lossgate.worlds.running import running
from lossgate.worlds.torch_versions import MIXED_DEVICES

DEVICE = "sim"
Kind = Literal["mixed devices", "waits", "other"]
_PATIENCE = 60.0
"""Seconds after which the child is taken to hang."""
_MOST_CPU_SECONDS = 10
"""Seconds of processor time that the child may use. On a busy machine they take longer."""
HUNG, DIED = "it did not return in time", "its process died"
_COMPILER, _NO_COMPILER = "torch._dynamo", "it needs torch's compiler"
_NEEDED = "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"
"""Modules that fake tensors need. The parent imports them, or each child would load them."""
_OWN = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class KernelRaised:
    """What a kernel raised on the fake device."""

    kind: Kind
    message: str
    place: str
    """The line of the kernel, as ``file.py:12``."""


def has_fake_device() -> bool:
    """Returns whether a kernel can run on a fake device here.

    The process must be able to fork a child, and must have no process groups yet.
    """
    return sys.platform == "linux" and not dist.is_initialized()


def raised_on_fake_device(case: Case) -> KernelRaised | None:
    """Runs a case on a fake device, on the last rank of its layout, and returns what it raised."""
    _ = case.placed.batch, case.placed.partition.token_shards  # made here, of real tensors

    def run(context: RankContext) -> object:
        return Case(case.candidate, case.problem, OneRank(context), case.bound).ranks

    return raised_in_child(case.problem.layout, run)


def raised_in_child(layout: Layout, run: Callable[[RankContext], object]) -> KernelRaised | None:
    """Calls a function in a child process in which the fake device is registered.

    Args:
        layout: the function gets the context of its last rank.
        run: the function. It is called outside of ``fake_device``.

    Returns:
        What the function raised. If the child dies or hangs, the kind is "other".
    """
    for module in _NEEDED:
        importlib.import_module(module)
    found = _answer_of_child(lambda: _raised(layout, run))
    if found is not None and found.message == _NO_COMPILER:
        importlib.import_module(_COMPILER)  # here, so that no other child loads it
        found = _answer_of_child(lambda: _raised(layout, run))
    return found


# The child process


def _answer_of_child(give: Callable[[], KernelRaised | None]) -> KernelRaised | None:
    """Forks a child, and returns what a function returns there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(give, reader, writer)
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
    """Sends the answer of the child and ends it, without Python's clean-up of a process."""
    try:
        from resource import RLIMIT_CPU, setrlimit  # Windows has no such module, and no such child

        os.close(reader)
        setrlimit(RLIMIT_CPU, (_MOST_CPU_SECONDS, _MOST_CPU_SECONDS))
        _quieten()
        torch.set_num_threads(1)  # OpenMP's other threads stayed in the parent; the child would wait for them
        found = give()
        with open(writer, "wb") as answer:
            pickle.dump(found, answer)
    finally:
        os._exit(0)


def _quieten() -> None:
    """Makes this process print nothing. Torch logs what a kernel can't do on a fake device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")  # the objects in their place may write elsewhere


# The device in this process


def _raised(layout: Layout, run: Callable[[RankContext], object]) -> KernelRaised | None:
    """Registers the device in this process, calls a function, and returns what it raised."""
    _register()
    try:
        with _last_rank(layout) as context:
            _put_off_the_compiler()  # only now: process groups look whether the compiler is loaded
            run(context)
    except _CompilerIsNeeded:
        return KernelRaised("other", _NO_COMPILER, "")
    except Exception as error:  # a kernel may raise anything
        kind, message = _described(error)
        return KernelRaised(kind, message, _place(error))
    return None


def _described(error: Exception) -> tuple[Kind, str]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return "waits", f"{error.func}"
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    # Some operations look for themselves, and raise a plain RuntimeError. In torch 2.11 all do.
    mixed = type(error).__name__ == "FakeTensorDeviceMismatchError" or any(words in message for words in MIXED_DEVICES)
    return "mixed devices" if mixed else "other", message


def _place(error: BaseException) -> str:
    """Returns the innermost line that is neither in torch nor in lossgate."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(_OWN)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(DEVICE)
    backend: Any = getattr(torch, DEVICE)
    backend.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # torch.autocast asks


@contextmanager
def fake_device() -> Generator[None]:
    """Makes every new tensor a fake one, also those on the CPU."""
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
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                if any(tensor.device.type == DEVICE for tensor in tensors):
                    raise
                raise _OnHost(f"{func} needs values of a tensor on the CPU, which is a fake one here") from None

    # A problem is made of real tensors. Torch has no thread for a device that is registered late.
    with torch.autograd.set_multithreading_enabled(False), FakeDevice(allow_non_fake_inputs=True):
        yield


class _OnHost(Exception):
    """A kernel needs a value of a tensor on the CPU. That is right, but a fake tensor has none."""


# Fake tensors without torch's compiler, which takes a second to load


class _CompilerIsNeeded(BaseException):
    """Something used a part of torch's compiler for which ``_NotLoaded`` has no stand-in.

    It is not an ``Exception``, so that a kernel's ``except Exception`` does not swallow it.
    """


class _NotLoaded(ModuleType):
    """Stands in for a module of torch's compiler, with the names that fake tensors use."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and inspect ask for names that need not be there
            raise AttributeError(name)
        raise _CompilerIsNeeded


class _Source:
    """Stands in for the compiler's record of where a symbolic shape is from. None exists here."""

    def __init__(self, *_: object) -> None:
        pass


def _not_compiled(function: Any = None, *_: object, **__: object) -> Any:
    """Stands in for ``torch._dynamo.disable`` of a function, which nothing compiles."""
    if function is None:
        raise _CompilerIsNeeded
    return function


def _put_off_the_compiler() -> None:
    """Lets fake tensors work in this child without loading torch's compiler."""
    if _COMPILER in sys.modules:
        return
    sources = dict.fromkeys(("AttrSource", "ConstantSource", "RandomValueSource"), _Source)
    source = _NotLoaded(f"{_COMPILER}.source", **sources)
    settings_folder = str(Path(torch.__file__).parent / "_dynamo")  # its config module is imported from there
    package = _NotLoaded(_COMPILER, __path__=[settings_folder], source=source, disable=_not_compiled)
    utils = _NotLoaded("torch._inductor.utils", device_supports_fp64=lambda _: True)
    sys.modules.update({module.__name__: module for module in (package, source, utils)})


# The one rank that runs


class OneRank:
    """A world in which only one rank runs, on the fake device."""

    def __init__(self, context: RankContext) -> None:
        self.layout, self._context, self.repeatable = context.layout, context, True

    def run(self, task: Task[T], *, order: str = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        with fake_device(), running(lambda: self._context.mesh):
            return [task(self._context)]

    def close(self) -> None:
        """Does nothing."""


@contextmanager
def _last_rank(layout: Layout) -> Generator[RankContext]:
    """Gives the context of the last rank. Its collectives return without the other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = layout.ranks - 1
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    groups: list[Any] = [dist.new_group(list(ranks_along(layout, rank, axis)), backend="fake") for axis in AXES]
    ranks = torch.arange(layout.ranks).view(*layout.sizes.values())
    mesh = DeviceMesh.from_group(groups, DEVICE, ranks, mesh_dim_names=AXES)
    yield RankContext(rank, layout, mesh, torch.device(DEVICE))
    dist.destroy_process_group()
