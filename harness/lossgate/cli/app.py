# SPDX-License-Identifier: Apache-2.0
"""The command ``lossgate``: exit codes, errors, numbers, and the files that commands write.

Commands import what they need when they run. Torch takes seconds to load, and a typing error should
be reported at once.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from importlib.metadata import version
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, Token

from lossgate import TESTED_TORCH, __version__
from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown


def versions() -> str:
    """Returns in words the versions of lossgate and torch, which is not loaded for that."""
    torch, (oldest, newest) = version("torch"), TESTED_TORCH
    is_newer = [int(n) for n in torch.split(".")[:2]] > [int(n) for n in newest.split(".")]
    return f"lossgate {__version__}, torch {torch}" + f" (not tested; {oldest} to {newest} are)" * is_newer


app = App(
    name="lossgate",
    help="Judge whether loss kernels compute the losses they claim to.",
    version=versions,
    version_flags=["--version"],
)
app.register_install_completion_command(
    help="Install completion for your shell (bash, zsh or fish). It works in new shells."
)

_UNTIL_SAID = 5.0
"""Seconds that the other processes of a torchrun leave rank 0 to print an error that all find."""

_CLOSED_PIPE = 141
"""Exit code if nobody reads standard output any more. SIGPIPE ends a process with the same code."""


class Exit(IntEnum):
    """The meaning of each exit code."""

    AGREE = 0
    DISAGREE = 1
    USAGE = 2
    INCONCLUSIVE = 3
    """Nothing wrong was seen, but not enough was seen."""
    CRASH = 4
    """lossgate itself failed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and exits. This is the entry point.

    Wrong use is reported in one line on stderr. By default ``arguments`` are those of the process.
    """
    from lossgate.base.launch import is_follower

    try:
        with _imports_first():
            code = app(
                sys.argv[1:] if arguments is None else arguments,
                exit_on_error=False,
                print_error=False,
                result_action="return_value",
            )
        sys.stdout.flush()
    except (CycloptsError, UsageError) as error:
        if is_follower():  # rank 0 reports the same error, and torchrun would end it when this process ends
            time.sleep(_UNTIL_SAID)
        else:
            say(str(error))
        code = Exit.USAGE
    except BrokenPipeError:  # for example with ``lossgate verify ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        code = _CLOSED_PIPE
    except Exception:
        traceback.print_exc()
        say("this is a fault of lossgate itself; please report it with the lines above")
        code = Exit.CRASH
    sys.exit(code)


@contextmanager
def _imports_first() -> Generator[None]:
    """Makes commands import files of users in another process first, because that may die.

    Ranks of torchrun import the files directly.
    """
    from lossgate.base.launch import launch_of_torchrun
    from lossgate.declaration.modules import StandIn, before_imports

    with ExitStack() as stack:

        def first(location: str) -> StandIn | None:
            from lossgate.engine.first_import import end_ready, import_first

            if parent_process() is not None:  # this is the other process, a copy of the first one
                return None
            stack.callback(end_ready)
            return import_first(location, say)

        if launch_of_torchrun() is None:
            stack.enter_context(before_imports(first))
        yield


def load() -> None:
    """Loads torch, and starts the server from which other processes fork. Does nothing under
    torchrun.
    """
    from lossgate.base.fork_server import load_and_fork
    from lossgate.base.launch import launch_of_torchrun

    if launch_of_torchrun() is None:
        load_and_fork()


def load_for(targets: Sequence[str]) -> None:
    """Calls ``load`` if a target is a file or module, because another process imports it first."""
    if any("." in target or ":" in target for target in targets):
        load()


def say(message: str) -> None:
    """Prints a message in one line on standard error."""
    print(f"lossgate: {' '.join(message.split())}", file=sys.stderr, flush=True)


def driven(world: str, body: Callable[[], int]) -> int:
    """Runs a command. If torchrun has launched this process, only rank 0 runs it, and the other
    processes serve as its ranks.

    Raises:
        UsageError: if torchrun has launched several processes, but the command runs in another
            world.
    """
    from lossgate.base.launch import is_follower, launch_of_torchrun

    launch = launch_of_torchrun()
    if launch is not None and launch.ranks > 1 and world != "torchrun":
        raise UsageError(
            f"torchrun launched {launch.ranks} processes, and each would do everything in world {world!r}; "
            "add --world torchrun, or start without torchrun"
        )
    if launch is None or world != "torchrun":
        return body()
    if is_follower():
        from lossgate.worlds.torchrun import follow

        return follow()
    code = Exit.USAGE
    try:
        code = body()
    finally:
        from lossgate.worlds.torchrun import dismiss

        sys.stdout.flush()  # now, because torchrun ends this process once another process has ended
        dismiss(code)
    return code


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """Reads the value of an option as a whole number. Without this, cyclopts would round 1.5 to 2.

    Raises:
        UsageError: if the value is anything else.
    """
    for base in (10, 0):  # the latter also reads 0x10
        with suppress(ValueError):
            return int(tokens[0].value, base)
    raise _wrong_value(tokens[0], "a whole number")


def _number(_: Any, tokens: Sequence[Token]) -> float:
    """Reads the value of an option as a number.

    Raises:
        UsageError: if the value is anything else.
    """
    with suppress(ValueError):
        return float(tokens[0].value)
    raise _wrong_value(tokens[0], "a number")


def _wrong_value(token: Token, expected: str) -> UsageError:
    return UsageError(f"{token.keyword} {shown(token.value)}: expected {expected}")


Whole = Annotated[int | None, Parameter(converter=_whole)]
"""A whole number, or None if the option is left out."""
Number = Annotated[float | None, Parameter(converter=_number)]
"""A number, or None if the option is left out."""


Text = Callable[[], str]
"""A function that makes the text of a file."""


def check_outputs(files: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Refuses to write over a file that is read, or over another output.

    Raises:
        UsageError: if a file would be lost.
    """
    taken = {_real(file): str(file) for file in inputs}
    for name, file in files.items():
        if file is None or (file.exists() and not file.is_file()):  # such as /dev/stdout
            continue
        if (real := _real(file)) in taken:
            raise UsageError(f"--{name} {file}: it would write over {taken[real]}; name another file")
        taken[real] = f"--{name} {file}"


def _real(file: Path) -> str:
    return os.path.realpath(file)


def write_outputs(outputs: Mapping[str, tuple[Path, Text]], code: Exit) -> Exit:
    """Writes files. If one cannot be written, that is reported, and the others are still written.

    Args:
        outputs: the file of each option, and its text.
        code: the exit code of the command so far.

    Returns:
        The exit code of the command. It is ``USAGE`` if a file could not be written, unless the
        code is ``DISAGREE``.
    """
    from lossgate.reports.written import write_file

    for name, (file, make) in outputs.items():
        try:
            write_file(file, make(), option=f"--{name}")
        except UsageError as error:
            say(str(error))
            code = code if code is Exit.DISAGREE else Exit.USAGE
    return code
