# SPDX-License-Identifier: Apache-2.0
"""What a user writes: a kernel, declared as a candidate for a spec.

The declaration says what can't be seen from outside: where the kernel starts, over which mesh axes it can be
split, in which precision it computes and how its local results make the global one.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate.declaration.contract import Contract
from lossgate.declaration.precision import Precision
from lossgate.dtypes import DTYPES
from lossgate.errors import UsageError
from lossgate.layout import AXES, Axis


class _Any:
    """The type of ``ANY``."""

    def __repr__(self) -> str:
        return "lossgate.ANY"


ANY: Final = _Any()
"""In ``supports``: every value that the spec allows."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a candidate returns on each rank, if more than the loss.

    loss: scalar; specs without a loss have none. logprobs, token_entropy: ``[local tokens]``, log-probability of each label and
    entropy of each distribution; values at masked tokens are ignored. metrics: scalars, by the names that the spec gives them.
    """

    loss: Tensor | None = None
    logprobs: Tensor | None = None
    token_entropy: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A disagreement that is known: the candidate is not searched, its frozen example is judged, and must still disagree.

    name: as in the document that describes it. example: a failure file, as ``lossgate verify`` writes it.
    """

    name: str
    example: Path


Kernel = Callable[[Any, Any, DeviceMesh], Outputs | Tensor]
"""``(inputs, options, mesh) -> Outputs`` or the loss alone; see the spec for its inputs and options."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel and its declaration. Calling it calls the kernel."""

    kernel: Kernel
    name: str
    spec: str
    head: str
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...]
    precision: Mapping[str, Precision]
    contract: Contract
    supports: Mapping[str, Any]
    differentiable: tuple[str, ...]
    """As declared; see ``Spec.differentiable``."""
    tiles: Mapping[str, tuple[int, ...]]
    good_for: str
    finding: Finding | None
    source: str
    """Where it can be loaded from, as ``file.py:name`` or ``package.module:name``."""

    def __call__(self, inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs | Tensor:
        return self.kernel(inputs, options, mesh)


def candidate(
    spec: str,
    *,
    head: str,
    axes: tuple[Axis, ...] = (),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    precision: Precision | Mapping[str, Precision] | None = None,
    contract: Contract | None = None,
    supports: Mapping[str, Any] | None = None,
    differentiable: tuple[str, ...] | None = None,
    tiles: Mapping[str, int | tuple[int, ...]] | None = None,
    good_for: str = "",
    finding: Finding | None = None,
    name: str | None = None,
) -> Callable[[Kernel], Candidate]:
    """Declare the decorated function a candidate for ``spec``.

    spec, head: what it computes and from where, see ``lossgate list``.
    axes: the mesh axes over which it can be split; none for a kernel of a single rank.
    dtypes: of the inputs it takes.
    precision: where it rounds; one for all dtypes, or by dtype. By default float32 inside, whatever the inputs.
    contract: how the ranks' results make the whole.
    supports: which values each option of the spec may take: ``ANY``, one value, or a tuple of them. An option that
        is not named is left at its default.
    differentiable: the outputs through which gradients flow: "loss" (the default, in specs that have one), "logprobs", "token_entropy".
    tiles: sizes at which its loops turn, by dim ("token", "vocab", "hidden"); problems are drawn on both sides of them.
    good_for: a few words for the verdict table.
    finding: a disagreement that is known and expected.
    name: by default the function's.
    """
    declared_in = sys._getframe(1).f_code.co_filename
    if unknown := [axis for axis in axes if axis not in AXES]:
        raise UsageError(
            f"candidate(axes={axes!r}): unknown mesh axis {unknown[0]!r}; expected any of {', '.join(AXES)}"
        )
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UsageError(
            f"candidate(dtypes={dtypes!r}): unknown dtype {unknown[0]!r}; expected any of {', '.join(DTYPES)}"
        )
    for dim, size in (tiles or {}).items():
        if not all(isinstance(s, int) and s > 0 for s in (size if isinstance(size, tuple) else (size,))):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"candidate(tiles={tiles!r}): {dim} is {size!r}; expected a positive number of rows, or a tuple of them"
            )
    per_dtype = dict(precision) if isinstance(precision, Mapping) else dict.fromkeys(dtypes, precision or Precision())
    if missing := [dtype for dtype in dtypes if dtype not in per_dtype]:
        raise UsageError(
            f"candidate(precision=...): no Precision for dtype {missing[0]!r}; give one for each of {', '.join(dtypes)}, or one for all"
        )

    def declare(kernel: Kernel) -> Candidate:
        own_name = name or getattr(kernel, "__name__", None)
        if own_name is None:
            raise UsageError(f"candidate(...) of {kernel!r}, which has no name; give it one: candidate(name=...)")
        return Candidate(
            kernel=kernel,
            name=own_name,
            spec=spec,
            head=head,
            axes=tuple(axes),
            dtypes=tuple(dtypes),
            precision=MappingProxyType(per_dtype),
            contract=contract or Contract(),
            supports=MappingProxyType(dict(supports or {})),
            differentiable=tuple(differentiable or ()),
            tiles=MappingProxyType(
                {dim: size if isinstance(size, tuple) else (size,) for dim, size in (tiles or {}).items()}
            ),
            good_for=good_for,
            finding=finding,
            source=f"{declared_in}:{own_name}",
        )

    return declare
