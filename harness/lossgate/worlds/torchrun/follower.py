# SPDX-License-Identifier: Apache-2.0
"""What a process other than rank 0 does: it serves."""

import signal

import torch.distributed as dist

from lossgate.launch import launch_of_torchrun
from lossgate.worlds.processes.server import serve
from lossgate.worlds.torchrun.meeting import connect, open_descriptors, open_store


def follow() -> int:
    """Serves as a rank until rank 0 is done. Returns the exit code that rank 0 gives."""
    launch = launch_of_torchrun()
    assert launch is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; rank 0 tells the others
    store = open_store()
    work, alarm = (connect(store, launch, purpose) for purpose in ("work", "alarm"))
    kept = open_descriptors()
    code = serve(
        launch.rank, launch.local_rank, work, alarm, lambda meeting, ranks: dist.PrefixStore(meeting, store), kept
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once the first process has ended
    return code
