# SPDX-License-Identifier: Apache-2.0
"""Describes a spec in sections, for the screen and for its page in the docs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lossgate.base.layout import AXES
from lossgate.declaration.contract import Contract
from lossgate.losses import SPECS
from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.heads import HEADS
from lossgate.specs.option import COMMON_OPTIONS, Option
from lossgate.specs.outputs import RETURNED, Output, gradient_output
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import INPUT_DTYPES, Field, fields_of
from lossgate.specs.spec import Spec


@dataclass(frozen=True)
class SpecEntry:
    """A row of a section: a name, a fact for each column, and the meaning of the name."""

    name: str
    facts: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class Section:
    """A table of facts about a spec."""

    title: str
    about: str
    """A text before the entries; it may be empty."""
    columns: tuple[str, ...]
    """The headings of the facts."""
    entries: tuple[SpecEntry, ...]
    is_code: bool = True
    """Whether the names are names in code."""


def sections(spec: Spec) -> Iterator[Section]:
    """Yields the sections of a spec that are not empty: all that the author of a kernel needs."""
    heads = [_head(spec, name) for name in spec.inputs]
    added = Section(
        "inputs at every head",
        "What this loss adds to the labels and the mask.",
        _FIELD,
        _fields(spec.added),
    )
    of_every_batch = fields_of(Batch)
    common = {name: field for name, field in fields_of(spec.batch_type).items() if name in of_every_batch}
    everywhere = Section(
        "inputs of every spec",
        "Every head has them, too. A reference gets floats as float64.",
        _FIELD,
        _fields(common),
    )
    parts = Section(
        "dims",
        "The part of each dim that a rank has. If a layout does not split the dim, each rank has all of it.",
        ("split over",),
        tuple(_dims(spec)),
    )
    options = Section("options", _about_options(spec), _OPTION, tuple(map(_option, spec.options)))
    has_logits = any(HEADS[head].has_logits for head in spec.inputs)
    general = Section(
        "options of every spec",
        "They are no fields of options. A candidate says in supports whether it takes such problems.",
        _OPTION,
        tuple(map(_option, COMMON_OPTIONS.values())) if has_logits else (),
    )
    outputs = Section("outputs", "What a candidate may return. It must return the first.", (), tuple(_outputs(spec)))
    together = Section(
        "what ranks make together",
        "This is the default, which lossgate.Contract can change. sum: lossgate adds up the results of the ranks. "
        "replicate: each rank has the whole. split: each rank has its own part.",
        ("over dp", "over cp", "over tp"),
        tuple(_together(spec)),
    )
    metrics = tuple(SpecEntry(name, (metric.reduction,), metric.meaning) for name, metric in spec.metrics.items())
    of_metrics = Section("metrics", _OF_METRICS, ("ranks",), metrics)
    scenarios = Section(
        "scenarios",
        "Ways in which problems draw the fields. If a candidate is never given some of them, it says so in supports, "
        "with lossgate.Excluded.",
        ("default", "choices"),
        tuple(map(_chosen, spec.situations.values())),
    )
    by_scenario = {f"{scenario.name}: {choice}" for scenario in spec.scenarios for choice in scenario.choices}
    shown_goals = {
        name: goal for name, goal in spec.all_goals.items() if name not in by_scenario and _is_of(spec, goal)
    }
    goals = Section(
        "coverage goals",
        "Situations that problems must reach before a verdict counts. Each choice of a scenario is a goal, too.",
        ("where",),
        tuple(_goal(name, goal) for name, goal in shown_goals.items()),
        is_code=False,
    )
    every = (*heads, added, everywhere, parts, options, general, outputs, together, of_metrics, scenarios, goals)
    yield from (section for section in every if section.entries)


_FIELD = ("dims", "dtype")
_OF_METRICS = (
    "Scalars that a candidate may return in metrics. The column ranks says how lossgate puts the results of dp and cp "
    "ranks together. Each tp rank has the same result."
)
_OPTION = ("default", "problems draw")


def _head(spec: Spec, name: str) -> Section:
    head = HEADS[name]
    if SPECS.get(spec.name) is spec:
        about = f"Annotate inputs with lossgate.inputs.{spec.inputs[name].__name__}."
    else:
        about = f"Annotate inputs with a class that joins lossgate.inputs.{head.inputs.__name__} and {_batch(spec)}."
    return Section(f'inputs at head "{name}", {head.meaning}', about, _FIELD, _fields(fields_of(head.inputs)))


def _batch(spec: Spec) -> str:
    return "lossgate.Batch" if spec.batch_type is Batch else spec.batch_type.__name__


def _about_options(spec: Spec) -> str:
    if not spec.options:
        return ""
    public = "lossgate.options." if SPECS.get(spec.name) is spec else ""
    return f"Annotate options with {public}{spec.options_type.__name__}."


def _fields(fields: Mapping[str, Field]) -> tuple[SpecEntry, ...]:
    return tuple(SpecEntry(name, (own.shape, INPUT_DTYPES[own.dtype]), own.meaning) for name, own in fields.items())


def _option(option: Option) -> SpecEntry:
    return SpecEntry(option.name, (repr(option.default), drawn_by_problems(option)), option.meaning)


def drawn_by_problems(option: Option) -> str:
    """Returns the choices of an option that problems draw, in words."""
    return option.domain if option.interval else ", ".join(map(repr, dict.fromkeys(option.choices)))


def _chosen(scenario: Option) -> SpecEntry:
    choices = ", ".join(dict.fromkeys(scenario.choices))
    if scenario.on_request:
        choices += f"; if those are excluded {', '.join(scenario.on_request)}"
    return SpecEntry(scenario.name, (scenario.default, choices), scenario.meaning)


def _dims(spec: Spec) -> Iterator[SpecEntry]:
    """Yields an entry for each dim of the inputs of a spec."""
    inputs = (field for head in spec.inputs for field in fields_of(spec.inputs[head]).values())
    for name, part in parts_of(dim for field in inputs for dim in field.dims).items():
        yield SpecEntry(name, (", ".join(part.split_over) or "nothing",), part.meaning)


def _together(spec: Spec) -> Iterator[SpecEntry]:
    """Yields an entry for each output and gradient: how the parts of ranks make the whole."""
    contract = Contract()
    for name in spec.outputs:
        meaning = "returned in float32, or in the dtype that Precision(returned=...) declares"
        yield _made(RETURNED[name], contract, meaning)
    leaves = {leaf: dims for head in spec.inputs for leaf, dims in HEADS[head].leaves.items()}
    for leaf, dims in leaves.items():
        yield _made(gradient_output(leaf, dims), contract, f"what backward leaves in inputs.{leaf}.grad")


def _made(output: Output, contract: Contract, meaning: str) -> SpecEntry:
    return SpecEntry(str(output), made_of_ranks(output, contract), meaning)


def made_of_ranks(output: Output, contract: Contract) -> tuple[str, ...]:
    """Returns how the parts of ranks make the whole of an output: a word for each of ``AXES``."""
    placements = contract.placements(output)
    split = {axis for part in parts_of(output.dims).values() for axis in part.split_over}
    return tuple("split" if axis in split else placements[axis] for axis in AXES)


_RETURNED = {
    "loss": "the loss, a scalar",
    "logprobs": "the log-probability of each token's label, [token]",
    "token_entropy": "the entropy of each token's distribution, in nats, [token]",
}


def _outputs(spec: Spec) -> Iterator[SpecEntry]:
    for name in spec.outputs:
        yield SpecEntry(name, (), _RETURNED[name])


def _is_of(spec: Spec, goal: CoverageGoal) -> bool:
    """Returns whether a goal can be reached from a head of the spec."""
    return not goal.heads or any(head in spec.inputs for head in goal.heads)


def _goal(name: str, goal: CoverageGoal) -> SpecEntry:
    where: list[str] = []
    if goal.heads:
        where.append(f"heads {', '.join(goal.heads)}")
    if goal.axes:
        over = f" over {goal.least_ranks} ranks or more" if goal.least_ranks > 2 else ""
        where.append(f"layouts that split {' or '.join(goal.axes)}{over}")
    if goal.dtypes:
        where.append(f"in {', '.join(goal.dtypes)}")
    return SpecEntry(name, ("; ".join(where) or "everywhere",), goal.meaning)


@dataclass(frozen=True)
class RankPart:
    """The part of a dim that a rank has."""

    split_over: tuple[str, ...]
    """The mesh axes over whose ranks it is split; none if each rank has all of it."""
    meaning: str


_PARTS: Mapping[str, RankPart] = MappingProxyType(
    {
        "token": RankPart(
            ("dp", "cp"),
            "the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag chunks of its cp rank",
        ),
        "sequence": RankPart(("dp",), "the sequences of its dp rank"),
        "sequences+1": RankPart(("dp",), "an entry for each sequence of its dp rank, and one more"),
        "vocab": RankPart(
            ("tp",), "rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split is padded"
        ),
        "hidden": RankPart((), "the whole width"),
    }
)
_WHOLE = RankPart((), "the whole")


def parts_of(dims: Iterable[str]) -> dict[str, RankPart]:
    """Returns the part that a rank has of each dim, by name; dims that may be split come first."""
    named = {*dims}
    known = {name: part for name, part in _PARTS.items() if name in named}
    return known | dict.fromkeys(sorted(named - known.keys()), _WHOLE)
