# SPDX-License-Identifier: Apache-2.0
"""Keeps a file that is imported from ending this process, and says where its import went wrong."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import NoReturn

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown


class _Ended(BaseException):
    """In place of the end of this process."""


@contextmanager
def guarded(location: str) -> Generator[None]:
    """Has the end of an import be an error of the file, whatever ended it.

    ``os._exit`` would end this process at once, with an exit code that is a verdict: 0 is AGREE.
    So it raises meanwhile, but not where lossgate itself calls it, as at a signal, nor in a process
    that the file has forked.

    Raises:
        UsageError: if the import raised anything but ``KeyboardInterrupt``, or called ``os._exit``.
    """
    process, own_exit, ends = os.getpid(), os._exit, list[str]()

    def refuse(status: int = 0) -> NoReturn:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if os.getpid() != process or caller.partition(".")[0] == "lossgate":
            own_exit(status)
        ends.append(f"it calls os._exit({status})")
        raise _Ended(ends[0])

    os._exit = refuse
    try:
        yield
    except (KeyboardInterrupt, UsageError):
        raise
    except BaseException as error:
        raise _import_error(location, error) from error
    finally:
        os._exit = own_exit
    if ends:
        raise _refusal(location, ends[0])


def _import_error(location: str, error: BaseException) -> UsageError:
    """Returns what is said of a file or module whose import raised an error."""
    message = " ".join(str(error).split())
    if isinstance(error, _Ended):
        return _refusal(location, f"{message}{_line(location, error)}")
    if isinstance(error, SystemExit):
        return _refusal(location, f"it calls sys.exit({shown(error.code)}){_line(location, error)}")
    if "relative import with no known parent" in message:
        module = ".".join(Path(location).with_suffix("").parts[-2:])
        return UsageError(f"{location}: can't be imported: {message}; name the module, as {module}, not its file")
    of_itself, at = _of_itself(location, error), "" if isinstance(error, SyntaxError) else _line(location, error)
    return UsageError(f"{location}: can't be imported: {type(error).__name__}: {message}{at}{of_itself}")


def _refusal(location: str, what: str) -> UsageError:
    return UsageError(f"{location}: can't be imported: {what}; put that under if __name__ == '__main__'")


def _line(location: str, error: BaseException) -> str:
    """Returns the line of the file that was at work, in words."""
    at = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename).name == Path(location).name]
    return f", on line {at[-1]}" if at else ""


def _of_itself(location: str, error: BaseException) -> str:
    """Returns what to say if a file has the name of a package, and finds itself in its place."""
    stem = Path(location).stem
    if not isinstance(error, ImportError) or not location.endswith(".py") or stem != (error.name or "").split(".")[0]:
        return ""
    return f"; {stem} is this file itself, because no package of that name is installed"
