# SPDX-License-Identifier: Apache-2.0
"""The command ``lossgate``: exit codes, numbers, files that are written, and what errors do.

What a command needs is imported in it: torch takes seconds to load, and a typing error should not.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from multiprocessing import parent_process
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, Token

from lossgate import __version__
from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown

app = App(
    name="lossgate",
    help="Judge whether loss kernels compute the losses they claim to.",
    version=__version__,
    version_flags=["--version"],
)
app.register_install_completion_command(
    help="Install completion for the shell in which this runs (bash, zsh or fish). A new shell has it."
)

_UNTIL_SAID = 5.0
"""Seconds in which rank 0 of a torchrun prints an error that all its processes find."""

_CLOSED_PIPE = 141
"""Exit code if nobody reads standard output any more, as that of a process that SIGPIPE ended."""


class Exit(IntEnum):
    """The meaning of each exit code."""

    AGREE = 0
    DISAGREE = 1
    USAGE = 2
    INCONCLUSIVE = 3
    """Nothing wrong was seen, and not enough was seen."""
    CRASH = 4
    """lossgate itself failed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits.

    An error of the user's is one line on stderr. ``arguments`` are those of the process by default.
    """
    from lossgate.base.errors import UsageError
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
        if is_follower():  # it finds the same as rank 0, which torchrun would end before it has said so
            time.sleep(_UNTIL_SAID)
        else:
            say(str(error))
        code = Exit.USAGE
    except BrokenPipeError:  # as by ``lossgate verify ... | head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        code = _CLOSED_PIPE
    except Exception:
        traceback.print_exc()
        say("this is a fault of lossgate itself; please report it with the lines above")
        code = Exit.CRASH
    sys.exit(code)


@contextmanager
def _imports_first() -> Generator[None]:
    """Has every command import files in a process that may die, before this one does.

    Not under torchrun, whose ranks import them as they are.
    """
    from lossgate.base.launch import launch_of_torchrun
    from lossgate.declaration.modules import before_imports

    with ExitStack() as stack:

        def first(location: str) -> None:
            from lossgate.engine.first_import import end_ready, import_first

            if parent_process() is not None:  # this is that other process, a copy of this one
                return
            stack.callback(end_ready)
            import_first(location, say)

        if launch_of_torchrun() is None:
            stack.enter_context(before_imports(first))
        yield


def load() -> None:
    """Loads torch, and starts the server of other processes. Under torchrun there is none."""
    from lossgate.base.fork_server import load_and_fork
    from lossgate.base.launch import launch_of_torchrun

    if launch_of_torchrun() is None:
        load_and_fork()


def load_for(targets: Sequence[str]) -> None:
    """Does so if a target is a file or module, which is imported first in another process."""
    if any("." in target or ":" in target for target in targets):
        load()


def say(message: str) -> None:
    """Tells something in one line, on standard error."""
    print(f"lossgate: {' '.join(message.split())}", file=sys.stderr, flush=True)


def driven(world: str, body: Callable[[], int]) -> int:
    """Runs a command. If torchrun has launched this process, rank 0 runs it, and the others serve.

    Raises:
        UsageError: if torchrun has launched several, and the command needs other ranks.
    """
    from lossgate.base.errors import UsageError
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

        sys.stdout.flush()  # before torchrun sees a process end, and ends the others
        dismiss(code)
    return code


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """Returns the whole number that an option is given. By itself cyclopts would round 1.5 to 2.

    Raises:
        UsageError: if it is given anything else.
    """
    for base in (10, 0):  # the latter also reads 0x10
        with suppress(ValueError):
            return int(tokens[0].value, base)
    raise _unlike(tokens[0], "a whole number")


def _number(_: Any, tokens: Sequence[Token]) -> float:
    """Returns the number that an option is given.

    Raises:
        UsageError: if it is given anything else.
    """
    with suppress(ValueError):
        return float(tokens[0].value)
    raise _unlike(tokens[0], "a number")


def _unlike(token: Token, expected: str) -> UsageError:
    return UsageError(f"{token.keyword} {shown(token.value)}: expected {expected}")


Whole = Annotated[int | None, Parameter(converter=_whole)]
"""A whole number, or None if the option is left out."""
Number = Annotated[float | None, Parameter(converter=_number)]
"""A number, or None if the option is left out."""


Text = Callable[[], str]
"""Makes the text of a file."""


def check_outputs(files: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Refuses to write over what is read, or over another file that is written.

    Raises:
        UsageError: if one would be lost.
    """
    from lossgate.base.errors import UsageError

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
    """Writes files. One that cannot be written is reported, and the others are written all the
    same.

    Args:
        outputs: the file that each option names, and its text.
        code: the exit code of the command so far.

    Returns:
        The exit code of the command: that of wrong use if a file could not be written and nothing
        disagrees.
    """
    from lossgate.base.errors import UsageError
    from lossgate.reports.written import write_file

    for name, (file, make) in outputs.items():
        try:
            write_file(file, make(), option=f"--{name}")
        except UsageError as error:
            say(str(error))
            code = code if code is Exit.DISAGREE else Exit.USAGE
    return code
