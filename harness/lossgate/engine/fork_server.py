# SPDX-License-Identifier: Apache-2.0
"""Starts worker processes quickly: each is forked from a server that has loaded torch and lossgate.

This module loads neither, so that the server can be started first of all.
"""

import multiprocessing
from multiprocessing.context import BaseContext

_LOADED = ["lossgate.engine.run", "torch.fx.experimental.symbolic_shapes"]
"""The second is what torch loads with the first backward pass; it takes half a second."""


def fork_server() -> BaseContext:
    """Returns what starts processes; where there are no fork servers, each starts afresh."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    return context


def start() -> None:
    """Starts the server, and does not wait until it has loaded everything."""
    if fork_server().get_start_method() == "forkserver":
        from multiprocessing.forkserver import ensure_running

        ensure_running()
