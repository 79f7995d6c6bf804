# SPDX-License-Identifier: Apache-2.0
"""What a user writes: a kernel, declared as a candidate for a spec.

The declaration says what cannot be seen from outside: where the kernel starts, over which mesh axes
it can be sharded, in which precision it computes, and how the results of ranks are put together.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate.base.argument import arguments
from lossgate.base.layout import Axis
from lossgate.declaration.budgets import Budgets
from lossgate.declaration.checks import declared, name_of
from lossgate.declaration.contract import Contract, Placements
from lossgate.declaration.conventions import Conventions
from lossgate.declaration.modules import note_made
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY, Excluded
from lossgate.numerics.float_formats import RoundedTo, coarsest_of
from lossgate.problems.whole_sequences import Tokens
from lossgate.specs.heads import HEADS
from lossgate.specs.heads.head import Head
from lossgate.specs.option import EMPTY
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The results of a candidate on each rank. A candidate may also return its loss alone.

    Each output is in float32, even if the inputs are in bfloat16; ``Precision(returned=...)``
    declares another dtype. Gradients are not returned: lossgate calls backward, and reads them from
    the inputs.
    """

    loss: Tensor | None = None
    """A scalar: this rank's part of the loss. The parts of dp and cp ranks are added up by
    lossgate, so divide by counts of the whole batch, such as ``inputs.valid_tokens``. Each tp rank
    returns the same. ``Contract(loss=...)`` declares otherwise. It stays None if the spec has no
    loss."""
    logprobs: Tensor | None = None
    """``[token]``, as ``inputs.labels``: the log-probability of each label of this rank, the same
    on each tp rank. Masked tokens are ignored. With ``Contract(logprobs={"cp": "replicate"})`` it
    has whole sequences in the shape of ``input_ids``: the log-probability of each token."""
    token_entropy: Tensor | None = None
    """``[token]``, like ``logprobs``: the entropy of each token's distribution, in nats."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars, by the names that the spec gives them. Metrics that are left out are not judged. The
    parts of dp and cp ranks are added up, or their least or largest is taken, as ``lossgate list
    SPEC`` says. Each tp rank returns the same. ``Contract(metrics=...)`` declares otherwise."""


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """A known disagreement of a candidate, in the cell of its frozen example.

    The example must still disagree. Then the failure is set aside, if that can be done, and new
    problems show whether anything else is wrong.

    Raises:
        UsageError: if the name is not one line, or the example is no ``Path``.
    """

    name: str
    """The heading under which a document describes it."""
    example: Path
    """A failure file, as ``lossgate verify`` writes it."""

    def __post_init__(self) -> None:
        given = arguments("KnownFailure(", vars(self))
        given["name"].line("the heading in the document that describes it, in one line")
        example: Any = self.example
        way_out = f"; write Path({example!r})" if isinstance(example, str) else ", such as Path('failure.json')"
        given["example"].instance(Path, f"a path{way_out}")


Kernel = Callable[[Any, Any, DeviceMesh], Outputs | Tensor]
"""A function of inputs, options and mesh that returns ``Outputs``, or the loss alone.

The spec declares the inputs and options.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel and its declaration.

    Calling it calls the kernel. It is pickled as its source, from which other processes load it.
    Pickling raises ``UsageError`` if the source does not hold this candidate.
    """

    kernel: Kernel
    name: str
    spec: Spec
    head: str
    tokens: Tokens
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...]
    precision: Mapping[str, Precision]
    contract: Contract
    supports: Mapping[str, Any]
    excludes: Mapping[str, Excluded]
    """By scenario: the choices that the kernel is never given, and why."""
    differentiable: tuple[str, ...]
    """The outputs that carry gradients."""
    tiles: Mapping[str, tuple[int, ...]]
    good_for: str
    known_failure: KnownFailure | None
    conventions: Conventions
    """What callers take care of."""
    exempt: Mapping[str, str]
    """By property: why the kernel is not held to it."""
    refuses: tuple[str, ...]
    """The kinds of bad input, of ``REFUSED``, for which it raises an error."""
    budgets: Budgets | None
    """The memory and traffic that it may use; None if it declares none."""
    source: str
    """The place from which it is loaded: ``file.py:name`` or ``package.module:name``."""
    beside: "Candidate | None" = None
    """Another candidate that solves the same problems and is compared with this one."""

    def __call__(self, inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs | Tensor:
        return self.kernel(inputs, options, mesh)

    def __reduce__(self) -> tuple[Any, ...]:
        from lossgate.declaration.loading import absolute_source, check_source, load_candidate  # they know this class

        check_source(self)
        return load_candidate, (absolute_source(self.source),)

    def __copy__(self) -> "Candidate":
        return self

    def __deepcopy__(self, memo: Any) -> "Candidate":
        return self

    @property
    def starts_at(self) -> Head:
        return HEADS[self.head]

    def coarsest(self, dtype: str) -> RoundedTo:
        """Returns the coarsest format to which this candidate, or the one beside it, rounds the
        inputs of the loss; see ``Precision.coarsest``.
        """
        stages = self.starts_at.stages
        both = (self, self.beside or self)
        return coarsest_of(candidate.precision[dtype].coarsest(dtype, stages) for candidate in both)

    def supported(self, name: str) -> Any:
        """Returns the values of an option that the candidate supports, or the choices of a scenario
        that it is given: ``ANY`` or a tuple.
        """
        if name in self.spec.situations:
            given = self.given(name)
            return ANY if set(given) == set(self.spec.situations[name].choices) else given
        values = self.supports.get(name, self.spec.supported_options[name].default)
        return values if values is ANY or isinstance(values, tuple) else (values,)

    def given(self, scenario: str) -> tuple[str, ...]:
        """Returns the choices of a scenario that the candidate's problems have.

        A choice that is listed twice is drawn twice as often.
        """
        own = self.spec.situations[scenario]
        excluded = self.excludes[scenario].choices if scenario in self.excludes else ()
        if scenario == EMPTY.name and self.conventions.ranks_have_tokens:
            excluded = (*excluded, "rank")
        left = tuple(choice for choice in own.choices if choice not in excluded)
        return left or tuple(choice for choice in own.on_request if choice not in excluded)

    @property
    def exclusions(self) -> dict[str, str]:
        """The reasons for the excluded choices, by scenario and choice."""
        reasons: dict[str, str] = {}
        for scenario, excluded in sorted(self.excludes.items()):
            reasons |= {f"{scenario} {choice}": excluded.because for choice in excluded.choices}
        return reasons

    def supports_all(self, options: Mapping[str, Any]) -> bool:
        """Returns whether the candidate supports these options, and the default of each option that
        is not among them.
        """
        for option in self.spec.options:
            supported = self.supported(option.name)
            if supported is not ANY and options.get(option.name, option.default) not in supported:
                return False
        return True

    def returns_whole(self, output: Output) -> bool:
        """Returns whether an output has whole sequences on every cp rank, in the shape of
        ``input_ids``.
        """
        return output.kind == "token value" and self.contract.whole_sequences

    def placements(self, output: Output) -> Placements:
        """Returns by axis how the ranks' parts of an output are put together."""
        if output.kind == "metric":
            return self.contract.placements(output, self.spec.metrics[output.name].reduction)
        return self.contract.placements(output)


def candidate(
    spec: str | Spec,
    *,
    head: str,
    tokens: Tokens = "shard",
    axes: tuple[Axis, ...] = (),
    dtypes: tuple[str | torch.dtype, ...] | torch.dtype = ("float32", "bfloat16"),
    precision: Precision | Mapping[str, Precision] | None = None,
    contract: Contract | None = None,
    supports: Mapping[str, Any] | None = None,
    differentiable: tuple[str, ...] | None = None,
    tiles: Mapping[str, int | tuple[int, ...]] | None = None,
    good_for: str = "",
    known_failure: KnownFailure | None = None,
    conventions: Conventions | None = None,
    exempt: Mapping[str, str] | None = None,
    refuses: tuple[str, ...] = (),
    budgets: Budgets | None = None,
    name: str | None = None,
) -> Callable[[Kernel], Candidate]:
    """Declares the decorated function a candidate for a spec.

    For example::

        @lossgate.candidate("nll", head="logits", axes=("dp", "cp"))
        def my_kernel(inputs: lossgate.inputs.NllLogits, options: NllOptions, mesh: DeviceMesh):
            targets = inputs.labels.masked_fill(~inputs.mask, -100)
            total = F.cross_entropy(inputs.logits.float(), targets, reduction="sum")
            return total / inputs.valid_tokens.clamp(min=1)

    Every rank calls the kernel. ``inputs`` has the shards of this rank, and counts of the whole
    batch: see ``lossgate.inputs``. ``options`` has every option of the spec: see
    ``lossgate.options``. ``mesh`` has the dims dp, cp and tp, whose groups work with
    ``torch.distributed``. The kernel returns its part of the loss, a scalar, or
    ``lossgate.Outputs``. Gradients are read from the inputs after backward.

    Args:
        spec: the loss that it computes, by name or as the object; see ``lossgate list``.
        head: where it starts: "hidden", "logits" or "logprobs"; "values" or "rewards" for critics
            and reward models.
        tokens: the form of inputs that have an entry for each token. With "shard" they have this
            rank's tokens, shifted and split. With "rows" and "packed" they have whole sequences, as
            a framework has them before it shifts and splits.
        axes: the mesh axes over which it can be sharded, of "dp", "cp", "tp"; none for a kernel of
            a single rank.
        dtypes: the dtypes of inputs that it takes, by name or as torch's own.
        precision: where it rounds: a ``Precision`` for all dtypes, or a mapping with one for each.
            By default it computes in float32, whatever the dtype of its inputs.
        contract: how the ranks' results are put together. By default loss, metrics and gradients of
            weight and bias are summed over dp and cp, and every tp rank has the same loss.
        supports: by option, the values that it may take: ``ANY``, one value, or a tuple of them. An
            option that is not named stays at its default. By scenario, the choices that the kernel
            is never given: ``lossgate.Excluded``. The verdict and evidence name them.
        differentiable: the outputs that carry gradients: "loss" (the default, in specs that have
            one), "logprobs", "token_entropy".
        tiles: the sizes at which its loops turn, by dim ("token", "vocab", "hidden"). Problems are
            drawn on both sides of them.
        good_for: a few words for the verdict table.
        known_failure: a disagreement that is known and expected.
        conventions: what its callers take care of, so that it need not promise it: what stands
            under the mask, which counts divide, and the like. The verdict and evidence name them.
        exempt: the properties to which it is not held, and why, as in ``{"strided-inputs": "the
            trainer gives contiguous tensors"}``; see ``lossgate list``. The verdict and evidence
            name them.
        refuses: a tuple of the kinds of bad input for which it raises an error: "labels" for a
            label of a trained token that is not in the vocabulary, and "shapes" for labels or ids
            that are one token too short. Property "bad-inputs" checks that it does. By default,
            ``()``, it may do anything with such input.
        budgets: the memory and traffic that a call may use; property "budgets" checks them.
        name: by default the function's.

    Raises:
        UsageError: if the declaration contradicts itself or the spec. The message names the nearest
            right spelling.
    """
    given = arguments("candidate(", locals())  # every argument, by its name
    declared_in = sys._getframe(1).f_code.co_filename
    declaration = declared(given)
    declaration["known_failure"] = given["known_failure"].instance(
        KnownFailure | None, "lossgate.KnownFailure(name=..., example=Path(...))"
    )

    def declare(kernel: Kernel) -> Candidate:
        called = name_of(kernel, declaration["name"])
        own: dict[str, Any] = {"kernel": kernel, "name": called, "source": f"{declared_in}:{called}"}
        made = Candidate(**{**declaration, **own})
        note_made(made)
        return made

    return declare
