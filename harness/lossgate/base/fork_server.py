# SPDX-License-Identifier: Apache-2.0
"""Starts worker processes quickly: each is forked from a server that has loaded torch and lossgate.

This module loads neither, so that the server can be started first of all. Only Linux has a server,
because forking is not safe on macOS. Elsewhere each worker starts afresh.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import Thread
from types import ModuleType
from typing import Any

_MOMENT = "500"
"""How often a thread looks whether it may go on, before it falls asleep: a few microseconds."""

_LOADED = ["lossgate.engine.child", "lossgate.engine.jobs", "lossgate.worlds.pool"]
_FIRST_BACKWARD = "torch.fx.experimental.symbolic_shapes"
"""What torch loads with the first backward pass; it takes half a second."""


def load_and_fork() -> None:
    """Loads torch and lossgate here, and makes the server a copy of this process.

    Loading takes seconds, and is then done once in place of twice. This is for a command as it
    starts: where torch is loaded already, kernels may have run, so that the server starts afresh.
    """
    if "torch" in sys.modules or sys.platform != "linux":
        worker_context()
        return
    from multiprocessing import resource_tracker

    gc.disable()  # a collection goes through all that is loaded so far, and none of it is garbage
    with _environment():
        for name in _LOADED:
            import_module(name)
    gc.freeze()  # nor will it be: no collection goes through it again, not even that at the end
    gc.enable()
    resource_tracker.ensure_running()  # or it would be a copy, too
    with _forked_from_here():
        worker_context()


def worker_context() -> BaseContext:
    """Returns what starts workers. A server is started, but it may still be loading."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_LOADED, _FIRST_BACKWARD])
    with _environment(), _no_interrupts():
        forkserver.ensure_running()
    return context


def start_process(target: Callable[..., object], *arguments: object, has_children: bool = False) -> BaseProcess:
    """Starts a process that does not run this one's script again.

    Python would run it, to find functions that it defines. A script that does not ask for its
    ``__name__`` would start everything once more.

    Args:
        target: what it runs. It calls ``start_worker`` first.
        arguments: of the target.
        has_children: it may start processes. Python then does not end it by itself, but waits.
    """
    context: Any = worker_context()
    process: BaseProcess = context.Process(target=target, args=arguments, daemon=not has_children)
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = script
    return process


def start_worker(environment: Mapping[str, str], orphaned: Callable[[], object] = bool) -> None:
    """Gives a worker the environment that its parent has now: the server has that of its start.

    The worker ends with its parent, even if that is killed. It then calls ``orphaned`` first.
    """
    Thread(target=_end_with_parent, args=(orphaned,), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without this each prints a traceback when interrupted
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_parent(orphaned: Callable[[], object]) -> None:
    """Waits for the end of the parent, which would leave the worker waiting for cells forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    orphaned()
    os._exit(1)


@contextmanager
def _forked_from_here() -> Generator[None]:
    """Has Python fork the server from this process, where it would start a new one."""
    start = util.spawnv_passfds

    def fork(path: str, arguments: Sequence[str], passed: Iterable[int]) -> int:
        if (pid := os.fork()) == 0:
            util.spawnv_passfds = start
            _serve(arguments[-1], passed)
        return pid

    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = start


def _serve(code: str, passed: Iterable[int]) -> None:
    """Runs the code of Python's server in this copy, and ends it."""
    try:
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *passed}:
            with suppress(OSError):  # that of the listing
                os.close(number)  # one is held by all users of the server, whose end it waits for
        python: Any = sys.modules["multiprocessing.forkserver"]
        python._forkserver._lock.release()  # held while the server is started, and copied so
        exec(code, {})
    finally:
        os._exit(0)


@contextmanager
def _environment() -> Generator[None]:
    """Has the server look for modules where this process does, and threads of torch fall asleep.

    By itself it would look in the current folder first. And a thread that waits for another keeps
    its core busy, so that the other waits for the core if several programs run: a large problem
    that takes 3 seconds took 80. A thread that falls asleep at once, though, is late for the next
    operation. So it stays awake for a moment, where OpenMP is GNU's: a problem of 1024x512x16384
    then took 34 seconds in place of 39. Beside another it is slower for that, 59 in place of 54.
    """
    before = dict(os.environ)
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", _MOMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _no_interrupts() -> Generator[None]:
    """Has the server ignore Ctrl-C while it loads, as it does later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
