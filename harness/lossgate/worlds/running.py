# SPDX-License-Identifier: Apache-2.0
"""The mesh of the rank that runs now, for code that asks the process for its groups."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from lossgate.errors import UsageError

_running: list[Callable[[], DeviceMesh | None]] = []
"""For each run under way in this process, what returns the mesh of the rank that runs; None if that
has not joined its groups yet."""


def current_mesh() -> DeviceMesh:
    """Returns the mesh of the rank that runs now: what its kernel is given as ``mesh``.

    It is for frameworks that keep their groups in variables of the process. Simulated ranks are
    threads of one process and share those variables, so have the framework's functions ask here::

        parallel_state.get_tensor_model_parallel_group = lambda *args, **kwargs: (
            lossgate.current_mesh().get_group("tp")
        )

    It is right in forward and backward, also in threads that torch starts for backward, and in
    worlds whose ranks are processes.

    Raises:
        UsageError: if no rank runs, as while a module is imported.
    """
    mesh = _running[-1]() if _running else None
    if mesh is None:
        raise UsageError("current_mesh(): no rank runs now; call it in a kernel, or in what a kernel calls")
    return mesh


@contextmanager
def running(mesh: Callable[[], DeviceMesh | None]) -> Generator[None]:
    """Has ``current_mesh`` return a mesh.

    Args:
        mesh: returns that of the rank that runs.
    """
    _running.append(mesh)
    try:
        yield
    finally:
        _running.remove(mesh)
