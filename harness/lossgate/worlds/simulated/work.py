# SPDX-License-Identifier: Apache-2.0
"""The handle that a collective returns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Torch has no public name for this class. Its C++ code accepts no other.
_WorkBase: Any = dist._Work


class SimulatedWork(_WorkBase):  # type: ignore[misc]
    """The handle of a collective or of a message.

    Args:
        wait: blocks the rank until the result is there; None if it is there already.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        """Blocks the rank until the result is there. A further call does nothing.

        Args:
            timeout: ignored, because a deadlock is found at once.

        Returns:
            True.

        Raises:
            CollectiveMisuse: a tensor of the collective or message changed before this call.
            CollectiveMismatch: the message differs from the tensor in shape or dtype.
            Unwind: the run fails, here or on another rank.
        """
        if self._wait is not None:
            self._wait()
            self._wait = None
        return True

    def is_completed(self) -> bool:
        return self._wait is None

    def is_success(self) -> bool:
        return self._wait is None

    def get_future(self) -> torch.futures.Future[None]:
        """Waits for the result, then returns a future that is complete."""
        self.wait()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def all_of(works: Sequence[SimulatedWork]) -> SimulatedWork:
    """Returns one handle that waits for several."""

    def wait() -> None:
        for work in works:
            work.wait()

    return SimulatedWork(wait)
