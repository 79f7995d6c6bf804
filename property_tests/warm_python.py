# SPDX-License-Identifier: Apache-2.0
"""Runs ``python``, ``lossgate`` and ``pytest`` in processes that have loaded torch and lossgate.

Most of the time of a short command goes into loading these. So tests that are about what a command
does, and not about how it starts, find commands of these names in ``warm_commands()``. Such a
command asks a server to fork itself, and waits for that process. The process has the arguments,
files, folder and environment of the command, and the command ends as the process does.
"""

import atexit
import gc
import importlib
import json
import multiprocessing.forkserver
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
number = int(server.recv(16))
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, lambda one, frame: os.kill(number, one))
said = server.recv(16)
code = int(said) if said else 1
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
COMMANDS = ("python", "lossgate", "pytest")

_LOADED = (
    "torch.fx.experimental.symbolic_shapes",
    "lossgate.cli",
    "lossgate.engine.child",
    "lossgate.engine.jobs",
    "lossgate.reports.terminal",
    "lossgate.worlds.pool",
)


@cache
def warm_commands() -> Path:
    """Returns a folder with the commands. Their server ends with this process.

    Forking is safe on Linux alone. Elsewhere they are those of the environment.
    """
    if sys.platform != "linux":
        return Path(sys.executable).parent
    folder = Path(mkdtemp(prefix="warm-python-"))
    ready, write = os.pipe()
    command = [sys.executable, "-m", "property_tests.warm_python", str(folder), str(write)]
    root = Path(__file__).parents[1]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root, pass_fds=[write])
    os.close(write)
    atexit.register(_end, server, folder)
    assert os.read(ready, 1), "the server of warm Python processes did not start"
    os.close(ready)
    for name in COMMANDS:
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket")))
        (folder / name).chmod(0o755)
    return folder


def _end(server: "subprocess.Popen[bytes]", folder: Path) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


# The server


def serve(folder: Path, ready: int) -> None:
    """Forks a process for each command until standard input is closed. Returns in these processes,
    ready to run the command.
    """
    _load()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        os.write(ready, b"+")
        os.close(ready)
        while True:
            came, _, _ = select.select([server, 0], [], [])
            if server not in came:
                os._exit(0)
            connection, _ = server.accept()
            if not os.fork():
                server.close()
                _watch(connection)
                return
            connection.close()
            _reap()


def _load() -> None:
    from lossgate.base.fork_server import worker_context

    for module in _LOADED:
        importlib.import_module(module)
    worker_context()
    gc.collect()
    gc.freeze()  # else the collector of each process would write to, and so copy, all that is loaded


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _watch(connection: socket.socket) -> None:
    """Forks once more. Returns in the new process, and has this one wait for its end: it tells the
    client, and kills the process if the client is gone.
    """
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    asked = b""
    while len(asked) < int.from_bytes(length, "big"):
        asked += connection.recv(1 << 16)
    process = os.fork()
    if not process:
        connection.close()
        _become(files, *json.loads(asked))
        return
    for file in files:
        os.close(file)
    with suppress(BrokenPipeError):  # the client has ended already: that is seen below
        connection.sendall(str(process).encode().ljust(16))
    end = os.pidfd_open(process)
    came, _, _ = select.select([end, connection], [], [])
    if end not in came:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(BrokenPipeError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode().ljust(16))
    os._exit(0)


def _become(files: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Gives this process what the command has.

    Its workers come from the server's own server of workers, which it can't ask whether it lives.
    """
    servers: Any = multiprocessing.forkserver
    servers.ensure_running = servers._forkserver.ensure_running = lambda: None
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    sys.modules.pop(str(__package__))  # the command does not know the tests
    sys.path[:] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + sys.path[1:]
    if "PYTHONWARNINGS" in environment:
        warnings.simplefilter(environment["PYTHONWARNINGS"])  # pyright: ignore[reportArgumentType]


# The process of a command


def run() -> None:
    """Runs what ``sys.argv`` asks for, as Python does."""
    name, given = Path(sys.argv[0]).name, sys.argv[1:]
    if name != "python":
        given = ["-m", name, *given]
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if given[0] == "-m":
        sys.argv = given[1:]
        if given[1] == "pytest":
            _allow_loaded_plugins()
        if name == "python":
            sys.path.insert(0, os.getcwd())
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    elif given[0] in ("-c", "-"):
        text = given[1] if given[0] == "-c" else sys.stdin.read()
        sys.argv = [given[0], *given[1 + (given[0] == "-c") :]]
        sys.path.insert(0, "")
        exec(compile(text, "<string>" if given[0] == "-c" else "<stdin>", "exec"), main.__dict__)
    else:
        sys.argv = given
        sys.path.insert(0, str(Path(given[0]).resolve().parent))
        runpy.run_path(given[0], run_name="__main__")


def _allow_loaded_plugins() -> None:
    """Has pytest not warn that it can't rewrite the assertions of plugins that are loaded."""
    options = os.environ.get("PYTEST_ADDOPTS", "")
    os.environ["PYTEST_ADDOPTS"] = f"{options} -W ignore::pytest.PytestAssertRewriteWarning"


def _end_quickly(code: int) -> None:
    """Ends this process as Python does, but for the modules: to take them down takes half a
    second.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
    code: Any = 0
    try:
        run()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    _end_quickly(int(code or 0))
