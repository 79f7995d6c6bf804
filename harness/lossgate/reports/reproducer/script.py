# SPDX-License-Identifier: Apache-2.0
"""Makes a reproducer from the numbers of a failure and the code that calls a kernel with them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES
from lossgate.cases.assemble import assemble
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.oracle import Oracle
from lossgate.cases.own_counts import Weights, weights_of_calls
from lossgate.cases.placement import PlacedProblem
from lossgate.cases.rank_call import RankOutputs, local_inputs, local_upstream
from lossgate.cases.returned import local_shape
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import absolute_source
from lossgate.engine.failure_files import FailureFile
from lossgate.engine.judge_again import candidate_of
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.problem import Problem
from lossgate.reports.reproducer import body
from lossgate.specs.outputs import Output, metric_output

_MOST = 200_000
"""The most numbers in a script. A larger file is slow to read, for people and for Python."""
_WIDTH = 120
_ROOM = 4.0
"""An output may be off by so many times the largest noise of right kernels."""


def _script_of(
    candidate: Candidate, problem: Problem, earlier: Sequence[Problem], returned: Sequence[str], reasons: Sequence[str]
) -> str:
    """Returns a script that calls a kernel as lossgate did, and prints its outputs next to what was
    expected.

    Args:
        candidate: the kernel. The script imports it from its source.
        problem: the problem on which the kernel disagrees.
        earlier: problems that run before it in the same process.
        returned: the names of the outputs that were compared; empty if the kernel failed earlier.
        reasons: what lossgate says of the failure and its cause.

    Raises:
        UsageError: if the script would hold too many numbers.
    """
    location, _, name = absolute_source(candidate.source).rpartition(":")
    calls, outputs = calls_of(candidate, [*earlier, problem]), outputs_of(candidate, problem, returned)
    count = _numbers_in([calls, outputs])
    if count > _MOST:
        raise UsageError(
            f"the problem has {count:,} numbers, too many for a script (at most {_MOST:,}); use lossgate replay, or "
            "run verify again: it makes failing problems smaller"
        )
    _, _, code = Path(body.__file__).read_text().partition('"""\n\n')  # without its docstring
    said = "".join(f"#     {line}\n" for reason in reasons for line in reason.splitlines())
    return (
        f"# Calls the kernel {name!r} with the numbers on which lossgate found it wrong:\n#\n{said}#\n"
        f"# On: {problem.describe()}.\n#\n"
        "# It needs torch and the kernel. It ends with status 1 while an output is wrong.\n\n"
        f"{code}\n\n"
        f"LOCATION, NAME = {location!r}, {name!r}\n"
        f'"""Where the kernel is: a file or module, and its name there."""\n'
        f"SIZES = {tuple(problem.layout.sizes[axis] for axis in AXES)}\n"
        f'"""Ranks along {", ".join(AXES)}."""\n'
        f"CALLS = {_written(calls)}\n"
        f'"""What each rank is given, by call."""\n'
        f"OUTPUTS = {_written(outputs)}\n"
        f'"""What the ranks\' parts make together, and what it should be, in float64."""\n\n'
        f'if __name__ == "__main__":\n    sys.exit(main(LOCATION, NAME, SIZES, CALLS, OUTPUTS))\n'
    )


def write_script(failure: FailureFile, candidate: str | None, file: Path) -> None:
    """Writes the reproducer of a failure file.

    Args:
        failure: the content of the failure file.
        candidate: the candidate to call instead of that of the failure file.
        file: the path of the script. It must not exist yet.

    Raises:
        UsageError: if a plain call does not show the failure, the candidate cannot be read, or the
            file cannot be written.
    """
    if failure.pooled:
        raise UsageError(
            "this failure shows only over many problems together, so no script shows it; use lossgate replay, without "
            "--script"
        )
    if failure.property != "agreement":
        raise UsageError(
            f"this failure is of property {failure.property!r}, which calls the kernel in its own way, but a script "
            "calls it once; use lossgate replay, without --script"
        )
    (example,) = failure.examples
    reasons = [*failure.reasons, *failure.causes]
    text = _script_of(
        candidate_of(failure, candidate), example.problem, failure.earlier, [*example.statistics], reasons
    )
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there already; choose another name with --script") from None
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}; choose another place with --script") from None


class _Code(str):
    """Python that stands for itself in the script."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def calls_of(candidate: Candidate, problems: Sequence[Problem]) -> list[list[dict[str, Any]]]:
    """Returns what each rank is given, for each call and rank."""
    return [[_given(candidate, one, rank) for rank in range(one.layout.ranks)] for one in problems]


def outputs_of(candidate: Candidate, problem: Problem, returned: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what the script needs for each output: its expected value, and how parts make it.

    Args:
        candidate: the kernel, whose contract says how parts make the whole.
        problem: the problem of the last call.
        returned: the names of the outputs that were compared. Gradients are always included.
    """
    placed = PlacedProblem(BoundProblem(candidate.spec, problem), problem)
    known = [candidate.spec.output(name) for name in candidate.spec.outputs]
    known += [metric_output(name) for name in candidate.spec.metrics]
    given = {str(output): output for output in known if str(output) in returned}
    gradients = candidate.starts_at.gradients(placed.batch.leaves)
    oracle = Oracle(candidate, placed, given.values())
    named = {**given, **{f"grad of {leaf}": output for leaf, output in gradients.items()}}
    weights: Weights = {}
    if candidate.conventions.counts == "own":
        weights = weights_of_calls(candidate, placed.bound, placed.batch, list(named.values()))
    one = [1.0] * problem.layout.ranks
    return [
        {"name": name, **_output(output, candidate, placed, oracle, weights.get(output, one))}
        for name, output in named.items()
    ]


def _given(candidate: Candidate, problem: Problem, rank: int) -> dict[str, Any]:
    """Returns what a rank is given: inputs, options, and upstream gradients of its outputs."""
    batch = PlacedProblem(BoundProblem(candidate.spec, problem), problem).batch
    return {
        "inputs": _attributes(local_inputs(candidate.spec, candidate.head, batch, rank, None, candidate.tokens)),
        "leaves": list(batch.leaves),
        "options": _attributes(candidate.spec.bind(problem.options).options),
        "upstream": {name: local_upstream(name, candidate, batch, rank) for name in batch.cotangents},
    }


def _attributes(given: Any) -> dict[str, Any]:
    """Returns the fields and the properties of a record, by name."""
    kind = type(given)
    names = [field.name for field in fields(given)] if is_dataclass(given) else list(vars(given))
    names += [name for name in dir(kind) if isinstance(getattr(kind, name), property) and not name.startswith("_")]
    return {name: getattr(given, name) for name in names}


def _output(
    output: Output, candidate: Candidate, placed: PlacedProblem, oracle: Oracle, weights: Sequence[float]
) -> dict[str, Any]:
    want, counted = oracle.reference[output], oracle.compared(output)
    unit = torch.finfo(TORCH_DTYPES[placed.problem.dtype] if output.kind == "gradient" else torch.float32).eps
    noise = oracle.deviations[output]
    places, factor = _places(candidate, placed, output)
    placements = candidate.placements(output).values()
    combine = next((placement for placement in placements if placement in ("min", "max")), "sum")
    return {
        "want": want,
        "places": places,
        "factors": [factor * weight for weight in weights],
        "combine": combine,
        "counted": None if counted is None else counted.tolist(),
        "allowed": _ROOM * _largest(noise) + unit * _largest(want),
    }


def _largest(x: Tensor) -> float:
    """Returns the largest finite entry, without its sign; 0 if there is none."""
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


def _places(candidate: Candidate, placed: PlacedProblem, output: Output) -> tuple[list[list[int]], float]:
    """Returns where the entries of each rank's part go in the whole, and the factor of parts.

    To find them, it assembles parts in which each entry is its own number.
    """
    ranks = placed.partition.layout.ranks
    width = placed.problem.hidden
    shapes = [local_shape(output, candidate, placed.partition, rank, width) for rank in range(ranks)]

    def put(parts: Sequence[Tensor]) -> Tensor:
        outputs: Sequence[RankOutputs] = [{output: part} for part in parts]
        return assemble(outputs, candidate, placed.partition, width).outputs[output].flatten()

    places: list[list[int]] = []
    factor = 1.0
    for rank in range(ranks):
        parts = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        parts[rank] = parts[rank] + 1
        ones = put(parts)
        if ones.numel() and float(ones.max()):  # a rank may have no part
            factor = float(ones.max())
        parts[rank] = torch.arange(1.0, parts[rank].numel() + 1, dtype=torch.float64).reshape(shapes[rank])
        places.append([round(one / factor) - 1 for one in put(parts).tolist()])
    return places, factor


def _numbers_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_numbers_in, value.values()))
    return sum(map(_numbers_in, value)) if isinstance(value, list) else 1


def _written(value: Any) -> str:
    return pformat(_as_code(value), width=_WIDTH, compact=True, sort_dicts=False)


def _as_code(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        values = _as_code(value.detach().flatten().tolist())
        return _Code(f"numbers({values}, {tuple(value.shape)}, {dtype!r})")
    if isinstance(value, Mapping):
        return {key: _as_code(one) for key, one in value.items()}
    if isinstance(value, float) and not isfinite(value):
        return _Code(f'float("{value}")')
    return [_as_code(one) for one in value] if isinstance(value, list) else value
