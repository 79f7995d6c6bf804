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
from lossgate.worlds.simulated.simulated_world import SimulatedWorld


class SimulatedRanks:
    """Calls functions on every rank of a layout, with all ranks in this process.

    For example::

        with lossgate.SimulatedRanks() as simulated_ranks:
            results = simulated_ranks(function, hidden, weight, tp=2, cp=2)

    In a pytest file, the fixture ``simulated_ranks`` is such an object. The first call with a
    layout makes its ranks. They serve later calls until ``close``.
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

        Each rank gets copies of the arguments, as a process of its own would. All ranks share what
        the function closes over.

        Args:
            function: gets the ``RankContext`` of its rank: ``rank``, ``layout``, ``device``, and
                ``mesh`` with the dims dp, cp and tp.
            arguments: tensors, modules, or whatever else ``copy.deepcopy`` can copy.
            dp, cp, tp: the sizes of the mesh axes.
            timeout: seconds for which a rank may neither reach a collective nor return.
            order: the order in which reductions add up what the ranks bring: "rank", "permuted",
                "tree" or "ring".
            seed: the seed of the permutations, if ``order`` is "permuted".

        Returns:
            The results of the function, by rank.

        Raises:
            RankFailure: the first failure of a rank. It names the rank and the line where the rank
                was. If the rank raised an exception, that is the ``__cause__``.
            UsageError: if the layout is not possible, or an argument can't be copied.
        """
        __tracebackhide__ = True
        if not callable(function):
            raise UsageError(f"simulated_ranks({function!r}): expected a function of a RankContext")
        layout = Layout(dp, cp, tp)
        world = self._of_calls.get((layout, timeout)) or self.world(layout, timeout)
        self._of_calls[layout, timeout] = world
        copies = [_copies(arguments) for _ in range(layout.ranks)]
        try:
            return world.run(lambda context: function(context, *copies[context.rank]), order=order, seed=seed)
        except RankFailure as failure:  # without the frames of lossgate, which say nothing to users
            raise failure.with_traceback(None) from failure.__cause__
        finally:
            self.log = list(world.log)

    def world(self, layout: str | Layout, timeout: float = 60.0) -> SimulatedWorld:
        """Returns a new world, for tests that look into it. ``close`` closes it with the others."""
        parsed = Layout.parse(layout) if isinstance(layout, str) else layout
        world = SimulatedWorld(parsed, timeout)
        self._worlds.append(world)
        return world

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
    """Copies the arguments for one rank. The copies share the tensors that the arguments share."""
    memo: dict[int, Any] = {}
    return [_copy(number, argument, memo) for number, argument in enumerate(arguments, 1)]


def _copy(number: int, argument: Any, memo: dict[int, Any]) -> Any:
    try:
        return deepcopy(argument, memo)
    except Exception as error:
        raise UsageError(
            f"simulated_ranks: argument {number}, a {type(argument).__name__}, can't be copied for each rank: {error}. "
            "Detach a tensor that has a graph, or let the function close over objects that all ranks may share"
        ) from None
