# SPDX-License-Identifier: Apache-2.0
"""Holds a kernel to the memory and traffic that it declares, and to keep no memory from calls."""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from lossgate.base.errors import CandidateError, UsageError
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.materialize import lay_out
from lossgate.cases.rank_call import RankCall
from lossgate.declaration.candidate import Candidate
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.observe import MemoryWatch, Use, observe
from lossgate.problems.problem import Problem
from lossgate.properties.registry import Checked, Resources, property

_TOKENS, _VOCAB, _HIDDEN = 64, 512, 8
"""The first sizes on each rank. The logits then take far more memory than all inputs together."""
_MOST_LOGITS = 1 << 21
"""The most logits on each rank."""
_TIMES = 3
"""How many times as many tokens the second problem has, on one rank."""
_GAIN = 0.9
"""Twice the size must bring the ``_share`` of the budget down by this factor, or is not taken."""
_SHOWN = ("tokens", "vocab")
"""Dims of the problem that every finding names."""
_SEQUENCES = 2
"""Groups of sequences on each dp rank."""


@property(
    "budgets",
    applies=lambda candidate: candidate.budgets is not None,
    runs=2,
    remedy="use less, or declare what the kernel needs",
    shrinks=False,
    of_ranks=True,
)
def budgets(case: Case) -> Checked:
    """Memory and collectives stay within what the candidate declares."""
    try:
        problem = demanding_problem(case)
    except UsageError as error:
        raise CandidateError(f"candidate {case.candidate.name!r}: {error}") from None
    # What does not grow as it should may be within the budget at one size.
    longer = replace(problem, lengths=tuple(_TIMES * length for length in problem.lengths))
    use = _use(case, problem)
    faults = tuple(_over(use, case.candidate, problem))
    if not faults and problem.layout.ranks == 1:  # more ranks take longer, and show the same
        faults = tuple(_over(_use(case, longer), case.candidate, longer))
    return Checked(faults=faults, resources=_resources(use, case, problem))


def _use(case: Case, problem: Problem) -> Use:
    bound = case.bound.derived(f"demanding {problem.to_json()}", lambda: BoundProblem(case.candidate.spec, problem))
    return observe(Case(case.candidate, problem, case.world, bound), lay_out(bound.unmasked, problem))


_CALLS = 4
"""A kernel may keep something of its last call or two, such as a workspace."""


@property(
    "no-leaks",
    runs=_CALLS,
    remedy="keep no graph from call to call: detach what is kept, and keep only so much",
)
def no_leaks(case: Case) -> Checked:
    """Equal calls do not each leave more tensors alive."""
    most = max(case.on_ranks(_left_by_each_call))
    if not most:
        return Checked()
    return Checked(faults=(f"each call leaves {most:,} more bytes of tensors alive, in {_CALLS} equal calls",))


def _left_by_each_call(call: RankCall) -> int:
    """Returns the bytes of tensors that the last call left alive; 0 unless each call but the first
    left some.
    """
    watch, alive = MemoryWatch(), list[int]()
    for _ in range(_CALLS):
        _call_within(watch, call.again())
        alive.append(watch.alive)
    left = [after - before for before, after in pairwise(alive)]
    if min(left) > 0:
        gc.collect()  # what only the collector of cycles frees is not kept
    return left[-1] if min(left) > 0 and watch.alive > alive[1] else 0


def _call_within(watch: MemoryWatch, call: RankCall) -> None:
    with watch.during("forward"):
        outputs = call.forward()
        call.backward(outputs)


def demanding_problem(case: Case) -> Problem:
    """Returns a problem with the options of the case's problem and with many logits.

    Sizes are doubled until a kernel that forms all logits is over budget. Doubling stops early if
    the budget grows with the logits.
    """
    candidate, size = case.candidate, (_TOKENS, _VOCAB)
    problem = _of_size(case.problem, *size)
    if candidate.budgets is None or not candidate.starts_at.has_logits:
        return problem
    share = _share(candidate, problem)
    while share > 1 and size[0] * size[1] < _MOST_LOGITS:
        next_share, next_size, larger = _doubled(case, *size)
        if next_share > _GAIN * share:
            break  # the budget grows with the logits
        share, size, problem = next_share, next_size, larger
    return problem


def _doubled(case: Case, tokens: int, vocab: int) -> tuple[float, tuple[int, int], Problem]:
    """Doubles tokens or vocabulary, whichever brings the ``_share`` of the budget further down.

    Returns:
        The share, the sizes, and the problem.
    """
    choices: list[tuple[float, tuple[int, int], Problem]] = []
    for size in ((2 * tokens, vocab), (tokens, 2 * vocab)):
        problem = _of_size(case.problem, *size)
        choices.append((_share(case.candidate, problem), size, problem))
    return min(choices, key=lambda choice: choice[0])


def _of_size(problem: Problem, tokens: int, vocab: int) -> Problem:
    """Returns a problem with so many tokens and rows of the vocabulary on each rank."""
    layout, group = problem.layout, problem.group_size
    sequences = _SEQUENCES * layout.dp * group
    length = max(tokens * layout.cp // (_SEQUENCES * group), 1)
    return replace(
        problem,
        lengths=(length,) * sequences,
        masks=("all",) * sequences,
        pad_to_multiple=1,
        hidden=_HIDDEN,
        vocab=vocab * layout.tp,
        vocab_split="balanced" if problem.vocab_split == "padded" else problem.vocab_split,
        forced_labels=(),
        outliers=(),
        label_boost=0.0,
    )


def _share(candidate: Candidate, problem: Problem) -> float:
    """Returns the largest ratio of a budget to what a kernel needs that forms all logits.

    Below 1 such a kernel is over each of these budgets.
    """
    sizes = _sizes(candidate, problem)
    logits = sizes["tokens"] * sizes["vocab"] / sizes["tp"]
    own = candidate.budgets.values(sizes) if candidate.budgets else {}
    size = logits * sizes["itemsize"]
    needs = {"largest_tensor": logits / 2, "peak": 2 * size, "saved": size}  # at the peak their gradient is alive, too
    return max((own[name] / needs[name] for name in own if name in needs), default=0.0)


def _sizes(candidate: Candidate, problem: Problem) -> dict[str, float]:
    """Returns the dims that a budget may name, each on the rank where it is largest."""
    partition, layout = problem.partition, problem.layout
    return {
        "tokens": max(len(shard) for shard in partition.token_shards.values()),
        "sequences": max(len(partition.sequences(dp)) for dp in range(layout.dp)),
        "vocab": problem.vocab,
        "hidden": problem.hidden,
        **{axis: float(size) for axis, size in layout.sizes.items()},
        "itemsize": TORCH_DTYPES[problem.dtype].itemsize,
    }


def _over(use: Use, candidate: Candidate, problem: Problem) -> Iterator[str]:
    """Yields what is over budget, in words."""
    if candidate.budgets is None:
        return
    sizes = _sizes(candidate, problem)
    for name, limit in candidate.budgets.values(sizes).items():
        if used := _words(use, name, limit):
            expression = getattr(candidate.budgets, name)
            named = {**sizes, **candidate.budgets.where}
            shown = dict.fromkeys((*_SHOWN, *candidate.budgets.names(name)))
            given = ", ".join(f"{dim} {named[dim]:g}" for dim in shown)
            yield f"{used}; the budget {name} is {expression} = {limit:,.6g} ({given})"


def _words(use: Use, name: str, limit: float) -> str:
    """Returns what the call uses of a resource, in words; "" if it is within the limit."""
    if name == "largest_tensor" and (made := use.largest_of_all) is not None:
        allowed = max(limit, use.largest_input)
        if made.elements <= allowed:
            return ""
        return f"{made.phase} makes {made.shown}, {made.elements:,} elements, in {made.operation}"
    if name == "peak" and use.largest_peak > limit:
        phase = max(use.peak, key=lambda phase: use.peak[phase])
        return f"{use.largest_peak:,} bytes live at a time in {phase}"
    if name == "saved" and use.saved > limit:
        return f"{use.saved:,} bytes live from forward to backward"
    kinds = ", ".join(f"{calls} {kind}" for kind, (calls, _) in use.by_kind().items())
    if name == "collectives" and len(use.collectives) > limit:
        count = len(use.collectives)
        return f"a rank makes {count} collective{'s' * (count > 1)}, {kinds}"
    if name == "host_waits" and len(use.host_waits) > limit:
        times = f"{len(use.host_waits)} time{'s' * (len(use.host_waits) > 1)}"
        return f"the host would wait for its device {times}, first in {use.host_waits[0]}"
    if name == "bytes" and use.bytes > limit:
        return f"a rank brings {use.bytes:,} bytes to collectives, {kinds}"
    return ""


def _resources(use: Use, case: Case, problem: Problem) -> Resources:
    """Returns what the call used, with the budgets."""
    candidate, sizes = case.candidate, _sizes(case.candidate, problem)
    limits: Mapping[str, float] = candidate.budgets.values(sizes) if candidate.budgets else {}
    made, forward, backward = use.largest_of_all, use.largest["forward"], use.largest["backward"]
    found: dict[str, dict[str, float]] = {
        "largest_tensor": {
            "elements": made.elements if made else 0,
            "forward": forward.elements if forward else 0,
            "backward": backward.elements if backward else 0,
        },
        "peak": {"bytes": use.largest_peak, "forward": use.peak["forward"], "backward": use.peak["backward"]},
        "saved": {"bytes": use.saved},
        "collectives": {"calls": len(use.collectives)},
        "bytes": {"bytes": use.bytes},
        "host_waits": {"calls": len(use.host_waits)},
    }
    for name, limit in limits.items():
        found[name]["budget"] = limit
    for kind, (calls, size) in use.by_kind().items():
        found[kind] = {"calls": calls, "bytes": size}
    return {**found, "problem": sizes}
