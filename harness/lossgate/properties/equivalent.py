# SPDX-License-Identifier: Apache-2.0
"""Properties of problems that are the same on paper: another order, another temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.assemble import Assembled
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.materialize import lay_out
from lossgate.cases.oracle import Oracle
from lossgate.cases.placement import PlacedProblem, takes_idle_ranks
from lossgate.cases.reference import DenseRun
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.judge.comparison import Comparison
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dims
from lossgate.problems.problem import Problem
from lossgate.properties.registry import Checked, called, property
from lossgate.properties.would_show import gradients, needing, trained_tokens, values
from lossgate.specs.outputs import Output

_COMMON: Mapping[str, Dims] = dict.fromkeys(("input_ids", "labels", "mask", "sequence"), ("token",))
"""The dims of the fields that every batch has."""


def _trains_both_ends(case: Case) -> bool:
    trained, groups = trained_tokens(case), _groups(case.problem)
    return all(bool(trained[_tokens_of(case.problem, group)].any()) for group in (groups[0], groups[-1]))


@property(
    "sequence-order",
    mistakes=needing("the first sequence and the last are taken for each other", _trains_both_ends),
    fits=lambda case: len(_groups(case.problem)) > 1 and _may_be_turned(case),
    remedy="start and end sequences where cu_seqlens says, and carry nothing from one to the next",
)
def sequence_order(case: Case) -> Checked:
    """Sequences in the opposite order give the same results."""
    old_numbers, turned = _turned(case.problem)
    order = {"token": _tokens_of(case.problem, old_numbers), "sequence": torch.tensor(old_numbers)}
    batch = _reordered(case.bound.batch, case.candidate, order)
    # Tokens still have the old numbers of their sequences. Ranks get new ones, from 0 on.
    new_numbers = torch.arange(len(old_numbers)).repeat_interleave(torch.tensor(turned.lengths))
    batch = replace(batch, partition=turned.unsharded.partition, fields={**batch.fields, "sequence": new_numbers})
    laid_out = lay_out(batch, turned)
    result = case.whole(case.on_ranks(batch=laid_out), laid_out)
    return Checked(comparisons=_judged(case, result, order, turned, batch))


def _turned(problem: Problem) -> tuple[list[int], Problem]:
    """Returns the numbers of the sequences with the groups in the opposite order, and the problem
    in that order.
    """
    sequences = [s for group in reversed(_groups(problem)) for s in group]
    lengths = tuple(problem.lengths[s] for s in sequences)
    masks = tuple(problem.masks[s] for s in sequences)
    return sequences, replace(problem, lengths=lengths, masks=masks, forced_labels=(), outliers=())


def _may_be_turned(case: Case) -> bool:
    """Returns whether each dp rank has a token in that order, if the candidate needs one."""
    _, turned = _turned(case.problem)
    fills = takes_idle_ranks(case.candidate) or "rank" not in turned.partition.empty
    return fills and not case.candidate.conventions.calls_need_training


def _groups(problem: Problem) -> list[range]:
    """Returns the numbers of the sequences of each group."""
    size = problem.group_size
    return [range(start, start + size) for start in range(0, len(problem.lengths), size)]


def _tokens_of(problem: Problem, sequences: Sequence[int]) -> Tensor:
    """Returns the numbers of the tokens of these sequences, one sequence after the other."""
    of_each = torch.arange(problem.tokens).split(list(problem.lengths))
    return torch.cat([of_each[s] for s in sequences])


@property(
    "vocabulary-order",
    mistakes=values("hangs on the number of a row"),
    applies=lambda candidate: candidate.starts_at.has_logits,
    remedy="give no row of the vocabulary a meaning of its own, the first and last rows of a shard or tile included",
)
def vocabulary_order(case: Case) -> Checked:
    """The rows of the vocabulary in the opposite order, and ids to match, give the same results."""
    batch, spec = case.bound.batch, case.candidate.spec
    order = {"vocab": torch.arange(case.problem.vocab).flip(0)}
    holding_ids = [name for name in ("labels", "input_ids", spec.gathered_ids) if name is not None]
    ids = {name: case.problem.vocab - 1 - batch.fields[name] for name in holding_ids}
    changed = _reordered(batch, case.candidate, order)
    changed = replace(changed, fields={**changed.fields, **ids})
    result = case.whole(case.on_ranks(batch=lay_out(changed, case.problem)))
    return Checked(comparisons=_judged(case, result, order, case.problem, changed))


def _judged(
    case: Case, result: Assembled, order: Mapping[str, Tensor], problem: Problem, batch: GlobalBatch
) -> tuple[Comparison, ...]:
    """Compares the results of a call in another order with the reference.

    In another order ranks hold other parts. If these cancel, rounding them makes larger errors. So
    outputs that disagree by the noise of the problem are judged again by the noise of that order.

    Args:
        case: the case of the problem, in its own order.
        result: the results of the call, in the other order.
        order: the other order, by dim.
        problem, batch: the problem and the batch in the other order.
    """
    found = case.judged(_put_back(result, order))
    wrong = {one.output for one in found if not one.agrees}
    if not wrong:
        return found
    bound = BoundProblem(case.candidate.spec, problem)
    bound.unmasked = bound.batch = batch
    oracle = Oracle(case.candidate, PlacedProblem(bound, problem), result.outputs)
    again = case.compare(result, oracle.gradients, oracle)
    right = {one.output: one for one in again if one.output in wrong and one.agrees}
    return tuple(right.get(one.output, one) for one in found)


def _reordered(batch: GlobalBatch, candidate: Candidate, order: Mapping[str, Tensor]) -> GlobalBatch:
    """Returns a batch in another order.

    Args:
        batch: the whole batch without padding.
        candidate: its head says which dims the leaves have.
        order: for each dim, the numbers of its entries in the other order.
    """
    dims = {**_COMMON, **batch.field_dims}
    leaf_dims = candidate.starts_at.leaves
    cotangent_dims = {name: ("token",) if one.dim() else () for name, one in batch.cotangents.items()}
    return replace(
        batch,
        leaves={name: _select(leaf, leaf_dims[name], order) for name, leaf in batch.leaves.items()},
        fields={name: _select(field, dims.get(name, ()), order) for name, field in batch.fields.items()},
        cotangents={name: _select(one, cotangent_dims[name], order) for name, one in batch.cotangents.items()},
    )


def _put_back(result: Assembled, order: Mapping[str, Tensor]) -> Assembled:
    """Returns the outputs of a call in another order, in the order of the problem."""
    back = {dim: numbers.argsort() for dim, numbers in order.items()}
    outputs = {output: _select(whole, output.dims, back) for output, whole in result.outputs.items()}
    return replace(result, outputs=outputs)


def _select(tensor: Tensor, dims: Dims, order: Mapping[str, Tensor]) -> Tensor:
    for axis, dim in enumerate(dims):
        if dim in order:
            tensor = tensor.index_select(axis, order[dim])
    return tensor


@property(
    "temperature",
    mistakes=gradients("is lost at other temperatures"),
    applies=lambda candidate: candidate.starts_at.has_logits and candidate.spec.temperature is not None,
    fits=lambda case: bool(_factors(case)) and case.bound.bound_spec.softcap is None,
    runs=2,
    remedy="divide the logits by the temperature, once, and their gradient by it, once",
)
def temperature(case: Case) -> Checked:
    """Logits and temperature that are both larger, or smaller, give the same results."""
    found = list[Comparison]()
    for factor in _factors(case):
        options, batch = _at(factor, case), case.bound.batch
        larger = {name: leaf if name == "weight" else leaf * factor for name, leaf in batch.leaves.items()}
        changed = replace(batch, leaves=larger)
        kept = case.kept(_rescaled(_reference(case, changed, options), factor))
        result = case.whole(case.on_ranks(batch=lay_out(changed, case.problem), options=options))
        result = replace(result, outputs=_rescaled(result.outputs, factor))
        found += called(f"with logits and temperature times {factor:g}", case.judged(result, among=kept))
    return Checked(comparisons=tuple(found))


_DOUBLINGS = 6
"""The most doublings. No spec allows temperatures that are farther apart."""


def _factors(case: Case) -> list[float]:
    """Returns the powers of two, which round nothing, that lead nearest to each end of the
    temperatures that the candidate supports.
    """
    spec, name = case.candidate.spec, case.candidate.spec.temperature
    if name is None or case.candidate.supported(name) is not ANY:
        return []
    option = next(option for option in spec.options if option.name == name)

    def is_allowed(factor: float) -> bool:
        options = _at(factor, case)
        return option.allows(options[name]) and not spec.conflict(options)

    halved = 0 if case.problem.dtype == "float16" else _DOUBLINGS  # small numbers of float16 do not halve exactly
    doubled = 1 if case.problem.dtype == "float16" else _DOUBLINGS  # and it has room for twice as much
    larger = [2.0**n for n in range(1, doubled + 1) if is_allowed(2.0**n)]
    smaller = [0.5**n for n in range(1, halved + 1) if is_allowed(0.5**n)]
    return [*larger[-1:], *smaller[-1:]]


def _at(factor: float, case: Case) -> dict[str, Any]:
    """Returns the options at so many times the temperature."""
    return {**case.problem.options, str(case.candidate.spec.temperature): factor * case.bound.bound_spec.temperature}


def _rescaled(outputs: Mapping[Output, Tensor], factor: float) -> dict[Output, Tensor]:
    """Multiplies the gradients of the leaves that were multiplied. They are so much smaller."""
    smaller = {output for output in outputs if output.kind == "gradient" and output.name != "weight"}
    return {output: whole * factor if output in smaller else whole for output, whole in outputs.items()}


def _reference(case: Case, batch: GlobalBatch, options: Mapping[str, Any]) -> Mapping[Output, Tensor]:
    returned = case.result.outputs
    return DenseRun(batch, case.problem.head).outputs(case.candidate.spec.bind(options).returning(returned))
