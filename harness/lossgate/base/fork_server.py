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
from functools import cache, partial
from importlib import import_module
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import Thread
from types import ModuleType
from typing import Any

from lossgate.base.own_process import before_a_signal_ends, remove_folder

_MOMENT = "500"
"""How often a waiting thread of OpenMP checks whether it may go on before it falls asleep. This
takes a few microseconds."""

_LOADED = ["lossgate.engine.child", "lossgate.engine.jobs", "lossgate.worlds.pool"]
_FIRST_BACKWARD = "torch.fx.experimental.symbolic_shapes"
"""The module that torch loads in the first backward pass. Loading it takes half a second."""


def load_and_fork() -> None:
    """Loads torch and lossgate here, and makes the server a copy of this process.

    So the seconds that loading takes are spent only once. Call this when a command starts. If torch
    is loaded already, kernels may have run in this process, so the server is started as a new
    process.
    """
    if "torch" in sys.modules or sys.platform != "linux":
        worker_context()
        return
    gc.disable()  # a collection goes through all that is loaded so far, and none of it is garbage
    with _environment():
        for name in _LOADED:
            import_module(name)
    gc.freeze()  # it never will be garbage: no later collection goes through it, not even that at exit
    gc.enable()
    _start_tracker()  # started below, it would be forked from this process, too
    with _forked_from_here():
        worker_context()


def worker_context() -> BaseContext:
    """Starts the server if there is none, and returns the context of multiprocessing that uses it.
    The server may still be loading then.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_LOADED, _FIRST_BACKWARD])
    _start_tracker()
    with _environment(), _no_interrupts():
        forkserver.ensure_running()
    _removed_at_signals(util.get_temp_dir())
    return context


@cache
def _start_tracker() -> None:
    """Starts Python's process that removes what ended processes leave, such as semaphores.

    Workers are killed, and with them what kernels have made, as torch's compiler does. So this
    process does not warn of what it removes.
    """
    from multiprocessing import resource_tracker

    name, own = "PYTHONWARNINGS", "ignore:resource_tracker"
    before = os.environ.get(name)
    os.environ[name] = f"{before},{own}" if before else own
    try:
        resource_tracker.ensure_running()
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@cache
def _removed_at_signals(folder: str) -> None:
    """Has the folder of the server's socket removed when a signal ends this process, too."""
    before_a_signal_ends(partial(remove_folder, folder))


def start_process(target: Callable[..., object], *arguments: object, has_children: bool = False) -> BaseProcess:
    """Starts a process that does not run the script of this process again.

    Python would run the script there, to find its functions. A script that does not check its
    ``__name__`` would then do all its work a second time.

    Args:
        target: the function that the process runs. It must call ``start_worker`` first.
        arguments: of the target.
        has_children: whether the process may start processes. At exit, Python then waits for its
            end and does not kill it.
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


def start_worker(environment: Mapping[str, str], orphaned: Callable[[], object] = lambda: None) -> None:
    """Prepares a worker: it gets the environment of its parent, and ends with its parent, even if
    that is killed.

    Args:
        environment: that of the parent now. The server still has the environment of its start.
        orphaned: called before the worker ends because its parent has ended.
    """
    Thread(target=_end_with_parent, args=(orphaned,), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without this each prints a traceback when interrupted
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_parent(orphaned: Callable[[], object]) -> None:
    """Ends this worker after its parent. Otherwise the worker would wait for cells forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    orphaned()
    os._exit(1)


@contextmanager
def _forked_from_here() -> Generator[None]:
    """Makes Python fork the server from this process. Otherwise it would start a new process."""
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
    """Runs the code of Python's server in this copy of the process, and then ends the copy."""
    try:
        open_files = {int(name) for name in os.listdir("/proc/self/fd")}
        # Among them is a pipe that all users of the server hold: it ends when all have closed that.
        for number in open_files - {0, 1, 2, *passed}:
            with suppress(OSError):  # the file of the listing itself is closed already
                os.close(number)
        python: Any = sys.modules["multiprocessing.forkserver"]
        python._forkserver._lock.release()  # this process held it when it was copied
        exec(code, {})
    finally:
        os._exit(0)


@contextmanager
def _environment() -> Generator[None]:
    """Sets the environment with which the server starts.

    The server looks for modules where this process does. By itself it would look in the current
    folder first.

    A thread of torch that waits for another thread falls asleep. Otherwise it keeps its core busy,
    and if several programs run, the other thread has to wait for that core: a large problem that
    takes 3 seconds took 80. But a thread that falls asleep at once is late for the next operation.
    So with the OpenMP of GNU, it first stays awake for a moment: a problem of 1024x512x16384 then
    took 34 seconds instead of 39. If another program runs, this costs time: 59 seconds instead of
    54.
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
    """Blocks Ctrl-C while the server starts. The server inherits this, so it ignores Ctrl-C while
    it loads, as it does later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
