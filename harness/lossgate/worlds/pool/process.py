# SPDX-License-Identifier: Apache-2.0
"""The process of a rank in the pool."""

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from lossgate.fork_server import start_worker
from lossgate.output_file import STANDARD_ERROR, print_to
from lossgate.process_folder import remove_folder
from lossgate.worlds.processes.server import serve


@dataclass(frozen=True)
class Start:
    """What a process is started with."""

    rank: int
    folder: str
    """Where ranks meet, in a file for each meeting."""
    output: str
    """The file for what it prints."""
    driver_folder: str
    """The folder of the driver's process, which holds both. A rank that outlives it removes it."""
    environment: Mapping[str, str]
    path: tuple[str, ...]
    """Where it looks for modules."""


def run_rank(start: Start, work: Connection, alarm: Connection) -> None:
    """Serves as a rank until the driver ends it, or ends itself."""
    start_worker(start.environment, lambda: remove_folder(start.driver_folder))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the driver, which ends its ranks
    sys.path[:] = start.path
    try:
        print_to(start.output)
        faulthandler.enable(file=STANDARD_ERROR, all_threads=False)
    except FileNotFoundError:
        os._exit(1)  # the driver has ended meanwhile, and its folder with it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    dist.set_debug_level_from_env()  # torch read it when the fork server loaded it
    rank = start.rank
    serve(rank, rank, work, alarm, lambda meeting, ranks: _file_store(start.folder, meeting, ranks), frozenset())


def _file_store(folder: str, meeting: str, ranks: int) -> dist.Store:
    return dist.FileStore(str(Path(folder, meeting)), ranks)


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"
