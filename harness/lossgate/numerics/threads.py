# SPDX-License-Identifier: Apache-2.0
"""How many threads torch computes with."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def all_cores() -> Generator[None]:
    """Computes with a thread on each core that the process may use.

    Only for float64: the last digits of a kernel's own numbers may hang on the number of threads.
    """
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(threads, cores or 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
