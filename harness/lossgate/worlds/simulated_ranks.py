# SPDX-License-Identifier: Apache-2.0
"""``SimulatedRanks``: runs functions on every rank of a layout, for tests and for trying things."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Self

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import RankFailure, T
from lossgate.worlds.simulated.communicator import Logged
from lossgate.worlds.simulated.world import SimulatedWorld


class SimulatedRanks:
    """Calls functions on every rank of a layout, with all ranks in this process.

    For example::

        with lossgate.SimulatedRanks() as simulated_ranks:
            results = simulated_ranks(function, hidden, weight, tp=2, cp=2)

    In a pytest file, the fixture ``simulated_ranks`` is one of these. The ranks of a layout are
    made in its first call, and serve later calls until ``close``.
    """

    def __init__(self) -> None:
        self._worlds: list[SimulatedWorld] = []
        self._of_calls: dict[tuple[Layout, float], SimulatedWorld] = {}
        self.log: Sequence[Logged] = ()
        """The collectives and sends of the last call, in the order in which ranks called them."""

    def __call__(
        self,
        function: Callable[..., T],
        *arguments: Any,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        timeout: float = 60.0,
        order: ReductionOrder = "rank",
        seed: int = 0,
    ) -> list[T]:
        """Calls ``function(context, *arguments)`` on every rank.

        Each rank gets copies of the arguments, as a process of its own would. What the function
        closes over is shared by all ranks.

        Args:
            function: gets the ``RankContext`` of its rank: ``rank``, ``layout``, ``device``, and
                ``mesh`` with the dims dp, cp and tp.
            arguments: tensors, modules, or whatever else ``copy.deepcopy`` can copy.
            dp, cp, tp: the sizes of the mesh axes.
            timeout: seconds for which a rank may neither reach a collective nor return.
            order: the order in which reductions add up what the ranks bring: "rank", "permuted",
                "tree" or "ring".
            seed: of the permutations, if ``order`` is "permuted".

        Returns:
            What the function returned on each rank, by rank.

        Raises:
            RankFailure: the first failure of a rank. It names the rank, and where it was; the
                exception that a rank raised is its ``__cause__``.
            UsageError: if a layout is not possible, or an argument can't be copied.
        """
        __tracebackhide__ = True
        if not callable(function):
            raise UsageError(f"simulated_ranks({function!r}): expected a function of a RankContext")
        layout = Layout(dp, cp, tp)
        world = self._of_calls.get((layout, timeout)) or self.world(layout, timeout)
        self._of_calls[layout, timeout] = world
        own = [_copies(arguments) for _ in range(layout.ranks)]
        try:
            return world.run(lambda context: function(context, *own[context.rank]), order=order, seed=seed)
        except RankFailure as failure:  # without the frames of lossgate, which say nothing to users
            raise failure.with_traceback(None) from failure.__cause__
        finally:
            self.log = list(world.log)

    def world(self, layout: str | Layout, timeout: float = 60.0) -> SimulatedWorld:
        """Returns a new world, for tests that look into it. ``close`` closes it with the others."""
        self._worlds.append(SimulatedWorld(Layout.parse(layout) if isinstance(layout, str) else layout, timeout))
        return self._worlds[-1]

    def close(self) -> None:
        """Ends all ranks."""
        for world in self._worlds:
            world.close()
        self._worlds.clear()
        self._of_calls.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _copies(arguments: Sequence[Any]) -> list[Any]:
    """Copies arguments. What two of them share is shared by their copies."""
    memo: dict[int, Any] = {}
    return [_copy(number, argument, memo) for number, argument in enumerate(arguments, 1)]


def _copy(number: int, argument: Any, memo: dict[int, Any]) -> Any:
    try:
        return deepcopy(argument, memo)
    except Exception as error:
        raise UsageError(
            f"simulated_ranks: argument {number}, a {type(argument).__name__}, can't be copied for each rank: {error}. "
            "Detach a tensor that has a graph, or let the function close over what all ranks may share"
        ) from None
