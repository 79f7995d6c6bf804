# SPDX-License-Identifier: Apache-2.0
"""What a spec is: a reference, its options and inputs, and the goals that problems must reach.

Every loss composes: loss(token values(logits(hidden))). A spec brings the last stage. The stages
before it are shared, and a kernel may start at any of them: its head.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dims
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.coverage_goals import BIAS_GOALS, TOKEN_GOALS, CoverageGoal, Covered
from lossgate.specs.field_context import FieldContext, checked, checked_dtype, draw_default
from lossgate.specs.logit_filter import FILTER_GOALS, FilterOptions
from lossgate.specs.option import COMMON_OPTIONS, OF_SIZES, Option
from lossgate.specs.outputs import RETURNED, Metric, Output, metric_output
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Field, fields_of
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS
from lossgate.specs.terms import Terms
from lossgate.specs.token_values import TokenValues
from lossgate.specs.users_code import told_as

Reference = Callable[[TokenValues, Any, Any], Tensor | tuple[Tensor, Mapping[str, Tensor]] | Terms | None]
"""``(values, batch, options) -> `` loss, or loss and metrics, or ``Terms``."""

ExtraMetrics = Callable[[TokenValues, Any, Any], Mapping[str, Tensor]]
"""``(values, batch, options) -> metrics``."""

DrawFields = Callable[[FieldContext], Mapping[str, Tensor]]
"""Draws several fields of a problem together."""


def trained_by_mask(batch: Batch) -> Tensor:
    """Returns ``[T]`` bool: the tokens that the mask trains."""
    return batch.mask


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """One loss: the inputs of its kernels, their outputs, and the goals that problems must reach.

    ``lossgate.spec`` makes it, and describes the fields.
    """

    name: str
    summary: str
    source: str
    function: Reference
    """The function that ``lossgate.spec`` decorates."""
    also_written: tuple[Reference, ...] = ()
    """Functions that compute the same loss in other ways, as kernels may."""
    batch_type: type[Batch]
    """The class of a kernel's inputs without the leaves of its head."""
    options_type: type
    options: tuple[Option, ...]
    option_groups: tuple[tuple[str, ...], ...] = ()
    inputs: Mapping[str, type[Batch]]
    """The class of a rank's inputs, for each head."""
    uses: tuple[str, ...]
    gathered_ids: str | None = None
    temperature: str | None = None
    softcap: str | None = None
    outputs: tuple[str, ...]
    metrics: Mapping[str, Metric]
    extra_metrics: ExtraMetrics | None = None
    scenarios: tuple[Option, ...] = ()
    draw: DrawFields | None = None
    trained: Callable[[Any], Tensor] = trained_by_mask
    trained_dim: Literal["token", "sequence"] = "token"
    group_size: int = 1
    goals: Mapping[str, CoverageGoal] = field(default_factory=dict)
    covered: Covered | None = None
    kinks: bool = False
    stop_gradient: bool = False
    tie_scenarios: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> Reference | None:
        """The function that gives the loss; None for a spec without a loss."""
        return self.function if "loss" in self.outputs else None

    def __call__(self, values: TokenValues, batch: Any, options: Any) -> Any:
        """Calls the reference."""
        if self.reference is None:
            raise UsageError(f"spec {self.name!r} has no loss, so there is no reference to call")
        return self.reference(values, batch, options)

    def __repr__(self) -> str:
        return f"Spec({self.name!r})"

    def __copy__(self) -> "Spec":
        return self

    def __deepcopy__(self, memo: Any) -> "Spec":
        return self

    @cached_property
    def added(self) -> Mapping[str, Field]:
        """The inputs that the spec adds to those of ``Batch`` and of the head."""
        common = fields_of(Batch)
        return {name: own for name, own in fields_of(self.batch_type).items() if name not in common}

    @cached_property
    def fields(self) -> Mapping[str, Dims]:
        """The dims of each of these inputs, by name."""
        return {name: own.dims for name, own in self.added.items()}

    @cached_property
    def unshifted(self) -> frozenset[str]:
        """The fields that belong to a token itself, not to the prediction of the next one."""
        return frozenset(name for name, own in fields_of(self.batch_type).items() if own.unshifted)

    @cached_property
    def supported_options(self) -> dict[str, Option]:
        """The options that a candidate's ``supports`` may name."""
        return {**COMMON_OPTIONS, **{option.name: option for option in self.options}}

    @cached_property
    def situations(self) -> dict[str, Option]:
        """The scenarios of which a candidate's ``supports`` may exclude choices."""
        return {**OF_SIZES, **{scenario.name: scenario for scenario in self.scenarios}}

    @cached_property
    def logit_options(self) -> tuple[str, ...]:
        """The options that change the logits before the loss gets them, and not the loss itself.

        They have no meaning for a head without logits.
        """
        named = {self.temperature, self.softcap}
        if issubclass(self.options_type, FilterOptions):
            named |= {one.name for one in dataclass_fields(FilterOptions)}
        return tuple(option.name for option in self.options if option.name in named)

    @cached_property
    def all_goals(self) -> dict[str, CoverageGoal]:
        """All goals by name: those of every loss, those that the spec declares, those of layouts,
        and one for each choice of a scenario.
        """
        common: dict[str, CoverageGoal] = {}
        if self.trained_dim == "token":
            common |= {**TOKEN_GOALS, **BIAS_GOALS}
        if issubclass(self.options_type, FilterOptions):
            common |= FILTER_GOALS
        if self.gathered_ids is not None:
            common |= IDS_GOALS
        of_scenarios = dict(goal for scenario in self.scenarios for goal in _goals_of(scenario))
        return {**common, **self.goals, **SHARDING_GOALS, **of_scenarios}

    def output(self, name: str) -> Output:
        """Returns the output of a name: "loss", "logprobs", "token_entropy" or a metric's."""
        return RETURNED[name] if name in RETURNED else metric_output(name)

    def ids_of(self, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns the vocabulary ids ``[T, k]`` that the loss looks up: by default the labels."""
        return fields[self.gathered_ids] if self.gathered_ids else fields["labels"][:, None]

    # Fields

    def batch(self, fields: Mapping[str, Any]) -> Any:
        """Returns fields as an object of the batch class."""
        return self.batch_type.of(fields)

    def draw_fields(self, context: FieldContext) -> dict[str, Tensor]:
        """Draws the fields that the spec adds, except counts."""
        drawn = dict[str, Tensor]()
        if self.draw is not None:
            with told_as(f"spec {self.name!r}: its draw="):
                drawn = dict(self.draw(context))
        for name in drawn:
            if name not in self.added:
                raise UsageError(
                    f"spec {self.name!r}: draw= gave {name!r}, which is no field; {nearest(name, self.added)}"
                )
        for name, own in self.added.items():
            if own.count is None:
                of_field = context.on(name, own.dims)
                if name not in drawn:
                    with told_as(f"spec {self.name!r}: the draw= of field {name!r}"):
                        drawn[name] = own.draw(of_field) if own.draw else draw_default(of_field, own.dtype)
                checked(of_field, drawn[name], own.dtype)
        return drawn

    def counts(self, fields: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the fields that count other fields.

        They are computed again whenever a token is masked.
        """
        trained = self.trained_of(fields) if self.trained_dim == "token" else fields["mask"]
        found = {"valid_tokens": trained.sum()}
        for name, own in fields_of(self.batch_type).items():
            if own.count is not None:
                with told_as(f"spec {self.name!r}: the count= of field {name!r}"):
                    counted = own.count(self.batch({**fields, **found}))
                found[name] = checked_dtype(f"field {name!r}: its count=", counted, own.dtype)
                if found[name].dim():
                    raise UsageError(
                        f"field {name!r}: its count= gave the shape {tuple(found[name].shape)}; expected a scalar"
                    )
        return found

    @cached_property
    def names_of_counts(self) -> tuple[str, ...]:
        """The fields that count the whole batch."""
        declared = (name for name, own in fields_of(self.batch_type).items() if own.count is not None)
        return tuple(dict.fromkeys(("valid_tokens", *declared)))

    def counted(self, batch: GlobalBatch) -> GlobalBatch:
        """Returns a batch with its counts computed anew."""
        return replace(batch, fields={**batch.fields, **self.counts(batch.known)})

    def trained_of(self, fields: Mapping[str, Any]) -> Tensor:
        """Returns which tokens, ``[T]`` bool, or which sequences, ``[S]`` bool, count for the loss.

        Raises:
            UsageError: if ``trained`` gives anything else.
        """
        size = len(fields["mask"]) if self.trained_dim == "token" else len(fields["cu_seqlens"]) - 1
        with told_as(f"spec {self.name!r}: its trained="):
            found: Any = self.trained(self.batch(fields))
        if not isinstance(found, Tensor) or found.dtype is not torch.bool or found.shape != (size,):
            given = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(
                f"spec {self.name!r}: its trained= gave {given}; expected bools, one for each {self.trained_dim}"
            )
        return found

    def covered_by(self, batch: GlobalBatch, options: Any) -> set[str]:
        """Returns the goals that ``covered`` says a problem reaches."""
        if self.covered is None:
            return set()
        with told_as(f"spec {self.name!r}: its covered="):
            found = set(self.covered(batch, options))
        if unknown := found - self.goals.keys():
            name = next(iter(unknown))
            raise UsageError(
                f"spec {self.name!r}: its covered= gave {name!r}, which is no goal; {nearest(name, self.goals)}"
            )
        return found

    # Options

    def bind(self, values: Mapping[str, Any]) -> BoundSpec:
        """Returns the spec with options.

        Args:
            values: the options that are not at their default.

        Raises:
            UsageError: if an option is unknown, or its value or their combination is not allowed.
        """
        known = {option.name: option for option in self.options}
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"problem: spec {self.name!r} has no option {name!r}; {nearest(name, known)}")
            if not known[name].allows(value):
                raise UsageError(f"problem: option {name} is {value!r}; spec {self.name!r} allows {known[name].domain}")
        options, why = self._made(values)
        if why:
            raise UsageError(f"problem: {why}")
        return BoundSpec(spec=self, values=values, options=options)

    def bind_options(self, options: Any) -> BoundSpec:
        """Returns the spec with an object of ``options_type``."""
        given = {option.name: getattr(options, option.name) for option in self.options}
        changed = {o.name: given[o.name] for o in self.options if given[o.name] != o.default}
        return BoundSpec(spec=self, values=changed, options=options)

    def conflict(self, values: Mapping[str, Any]) -> str:
        """Returns the reason for which these options are not valid together; "" if they are.

        Raises:
            UsageError: if the option class raises anything but ``ValueError``.
        """
        return self._made(values)[1]

    def _made(self, values: Mapping[str, Any]) -> tuple[Any, str]:
        """Returns an object of ``options_type`` and ""; or None and the reason for which the
        options are not valid.
        """
        try:
            return self.options_type(**values), ""
        except ValueError as error:
            return None, str(error) or "they are not valid"
        except (Exception, SystemExit):
            with told_as(f"spec {self.name!r}: {self.options_type.__name__}, which must refuse options by ValueError,"):
                raise

    def with_choice(self, values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any] | None:
        """Returns these options with another value of one of them.

        If that value is not valid with the other options of its group, as few of those as possible
        are changed. Returns None if no change makes it valid.
        """
        changed = {**values, name: value}
        if not self.conflict(changed):
            return changed
        group = next((group for group in self.option_groups if name in group), (name,))
        now = tuple(values.get(n, self.supported_options[n].default) for n in group)
        choices: list[list[Any]] = []
        for n, own in zip(group, now, strict=True):
            others = [choice for choice in self.supported_options[n].choices if choice != own]
            choices.append([value] if n == name else [own, *others])

        def changes(combination: tuple[Any, ...]) -> int:
            return sum(new != own for new, own in zip(combination, now, strict=True))

        for combination in sorted(product(*choices), key=changes):
            changed = {**values, **dict(zip(group, combination, strict=True))}
            if not self.conflict(changed):
                return changed
        return None


def _goals_of(scenario: Option) -> Iterator[tuple[str, CoverageGoal]]:
    """Yields a goal for each choice of a scenario. A scenario with a single choice has no goal."""
    choices = tuple(dict.fromkeys(scenario.choices))
    if len(choices) < 2:
        return
    for choice in choices:
        others = (*(other for other in choices if other != choice), *scenario.on_request)
        meaning = f"a problem with {scenario.name} {choice!r}"
        yield f"{scenario.name}: {choice}", CoverageGoal(meaning=meaning, unreachable_if={scenario.name: others})
