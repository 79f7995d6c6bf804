# SPDX-License-Identifier: Apache-2.0
"""Temporary folders of processes. Who starts a process that may be killed removes its folder."""

import atexit
import os
import shutil
from functools import partial
from tempfile import mkdtemp

from lossgate.interruption import before_a_signal_ends

_TRIES = 100
_of_this_process = list[str]()


def process_folder() -> str:
    """Returns the temporary folder of this process: the one that it was given, or a new one."""
    if not _of_this_process:
        _of_this_process.append(new_folder())
    return _of_this_process[0]


def take_folder(folder: str) -> None:
    """Gives this process a folder that the process which started it has made, and will remove."""
    _of_this_process[:] = [folder]


def new_folder() -> str:
    """Makes a temporary folder. It is removed at the latest when this process ends."""
    folder = mkdtemp(prefix="lossgate-")
    remove = partial(remove_folder, folder)
    atexit.register(remove)
    before_a_signal_ends(remove)
    return folder


def remove_folder(folder: str) -> None:
    """Removes a folder, even while other processes make files in it, or remove it too."""
    for _ in range(_TRIES):  # a file that is made after the folder was listed keeps it from being removed
        if not os.path.exists(folder):
            break
        shutil.rmtree(folder, ignore_errors=True)
