# SPDX-License-Identifier: Apache-2.0
"""Makes a candidate of a plain function of tensors.

Its parameters are given things of the batch, by name: the inputs of a kernel, its options, and what
frameworks make of these, such as labels of -100 and rows of a batch.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lossgate.base.argument import Argument, arguments
from lossgate.base.layout import AXES, Axis, Layout
from lossgate.base.spelling import nearest
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.declaration.checks import check_spec, declared
from lossgate.declaration.conventions import Conventions
from lossgate.declaration.supports import ANY, Excluded
from lossgate.plain_functions.presets import PRESETS, Preset
from lossgate.specs.heads import HEADS
from lossgate.specs.record import Field, fields_of
from lossgate.specs.spec import Spec

_IGNORED = -100
"""The label of a token that is not trained, as torch, transformers and Liger have it."""
_MASKS = ("mask", "int_mask")
_PAIRED = ("chosen_", "rejected_")
_SHARED = "_per_sequence"
_ONE_ADVANTAGE = Excluded("token", because="the function has one advantage for each response")
_ALL_COUNT = Excluded("some", because="the function has no mask of sequences")
_EXAMPLE = "{'logits': 'logits', 'target': 'labels'}"

Parameters = Mapping[str, inspect.Parameter]


def as_candidate(
    call: str,
    fn: Any,
    spec: str | Spec,
    inputs: Mapping[str, Any] | str,
    *,
    head: str | None = None,
    rows: bool | None = None,
    options: Mapping[str, Any] | None = None,
    conventions: Conventions | None = None,
    precision: Any = None,
    dtypes: Any = ("float32",),
    layouts: Sequence[str] = (),
) -> Candidate:
    """Returns the candidate of a plain function.

    Args:
        call: how the call of the user begins, with its parenthesis; messages begin with it.
        fn: the function, or a module of torch.
        spec: the loss, by name or as the object.
        inputs: by parameter, what it is given; or the name of a preset.
        head: where the function starts; by default it follows from ``inputs``.
        rows: whether it takes rows; by default as the preset says, or else not.
        options: as ``supports`` of ``lossgate.candidate``. An option that a parameter is given
            takes all its values by default.
        conventions: by default, what callers of plain functions take care of.
        precision: as for ``lossgate.candidate``.
        dtypes: as for ``lossgate.candidate``.
        layouts: it has the axes of these; dp, if there are none.

    Raises:
        UsageError: if an argument is wrong.
    """
    given = arguments(call, locals())
    own, name, parameters = check_spec(given["spec"]), _name_of(fn), _parameters(given["fn"])
    preset = _preset(given["inputs"], own) if isinstance(inputs, str) else None
    mapping = _of_preset(given["inputs"], preset, parameters) if preset else given["inputs"].mapping(_EXAMPLE)
    _check_parameters(given["inputs"], mapping, parameters)
    asked, named = Argument(call, "inputs", mapping), [one for one in mapping.values() if isinstance(one, str)]
    for parameter, thing in mapping.items():
        _check_thing(asked.item(parameter), thing, own)
    if head is None:
        given["head"] = Argument(call, "head", _head_of(asked, own, named))
    start: str = given["head"].one_of(own.inputs, f"spec {own.name!r} has no such head")
    _check_leaves(asked, start, named)
    is_rows = preset is not None and preset.rows if rows is None else given["rows"].truth()
    if not is_rows and "unshifted_labels" in named:
        raise asked.error("labels are unshifted in rows alone; write rows=True")
    if conventions is None:
        given["conventions"] = Argument(call, "conventions", _conventions(own, start, named, preset))
    declaration = {
        **given,
        "supports": Argument(call, "options", _options(given["options"], own, named, preset)),
        **arguments(call, {"tokens": "shard", "axes": _axes(layouts), "good_for": "", "refuses": (), "name": name}),
        **arguments(call, dict.fromkeys(("contract", "differentiable", "tiles", "exempt", "budgets"))),
    }
    return Candidate(
        kernel=PlainKernel(
            fn, mapping, tuple(_by_position(parameters)), _Things(own, start, frozenset(named), rows=is_rows)
        ),
        source=f"{_file_of(fn)}:{name}",
        known_failure=None,
        **declared(declaration),
    )


# The function


def _unwrapped(fn: Any) -> Any:
    while isinstance(fn, partial):
        fn = fn.func
    return fn


def _name_of(fn: Any) -> str:
    bare = _unwrapped(fn)
    name = getattr(bare, "__name__", type(bare).__name__)
    return "function" if name == "<lambda>" else name


def _file_of(fn: Any) -> str:
    bare = _unwrapped(fn)
    code = getattr(bare, "__code__", None)
    return str(Path(code.co_filename)) if code is not None else type(bare).__module__


def _parameters(fn: Argument) -> Parameters:
    """Returns the parameters of a function by name."""
    if isinstance(fn.value, Candidate):
        raise fn.error("it is a candidate already; write lossgate.verify(it).check(), or test_it = lossgate.suite(it)")
    if not callable(fn.value):
        raise fn.error("expected a function of tensors")
    try:
        signature = inspect.signature(fn.value.forward if isinstance(fn.value, nn.Module) else fn.value)
    except (TypeError, ValueError):
        raise fn.error("it has no signature; wrap it in a function of named parameters") from None
    return signature.parameters


def _check_parameters(inputs: Argument, mapping: Mapping[Any, Any], parameters: Parameters) -> None:
    """Checks that the function has the parameters of a mapping, and needs no others."""
    if not mapping:
        raise inputs.error(f"expected what each parameter is, such as {_EXAMPLE}, or one of {', '.join(PRESETS)}")
    kinds = inspect.Parameter
    own = [one for one, kind in parameters.items() if kind.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    if len(own) == len(parameters) or not any(one.kind is kinds.VAR_KEYWORD for one in parameters.values()):
        for name in mapping:
            inputs.known(name, own, "the function has no parameter")
    for name in own:
        if parameters[name].default is kinds.empty and name not in mapping:
            raise inputs.error(
                f"nothing is given to parameter {name!r}; name the thing of the batch that it is, or a constant"
            )


def _by_position(parameters: Parameters) -> Iterator[str]:
    yield from (one for one, own in parameters.items() if own.kind is inspect.Parameter.POSITIONAL_ONLY)


# Declaration


def _preset(inputs: Argument, spec: Spec) -> Preset:
    preset: Preset = PRESETS[inputs.one_of(PRESETS, "expected a mapping, or a preset")]
    if preset.spec != spec.name:
        raise inputs.error(f"that preset is of spec {preset.spec!r}, not of {spec.name!r}")
    return preset


def _of_preset(inputs: Argument, preset: Preset, parameters: Parameters) -> dict[str, Any]:
    """Returns what each parameter is given, as a preset says."""
    mapping = {one: preset.names[one] for one in parameters if one in preset.names}
    if missing := [one for one in preset.needs if one not in mapping.values()]:
        names = [one for one, thing in preset.names.items() if thing == missing[0]]
        raise inputs.error(
            f"it has a parameter named {' or '.join(names)}, and the function has {', '.join(parameters)}; write a "
            f"mapping instead, such as inputs={_EXAMPLE}"
        )
    return mapping


def _head_of(inputs: Argument, spec: Spec, named: Sequence[str]) -> str:
    """Returns the head of a spec whose differentiable inputs are among what is named."""
    leaves = {leaf: head for head in spec.inputs for leaf in HEADS[head].leaves}
    found = dict.fromkeys(leaves[one] for one in map(_base, named) if one in leaves)
    if len(found) == 1:
        return next(iter(found))
    expected = "; or ".join(" and ".join(leaf for leaf in HEADS[one].leaves if leaf != "bias") for one in spec.inputs)
    problem = "names the inputs of several heads" if found else "names no input that has a gradient"
    raise inputs.error(f"{problem}; spec {spec.name!r} starts from {expected}")


def _check_leaves(inputs: Argument, head: str, named: Sequence[str]) -> None:
    for leaf in HEADS[head].leaves:
        if leaf != "bias" and leaf not in map(_base, named):
            raise inputs.error(f"no parameter is given {leaf!r}, which has a gradient at head {head!r}, too")


def _options(given: Argument, spec: Spec, named: Sequence[str], preset: Preset | None) -> dict[str, Any]:
    found: dict[str, Any] = {one: ANY for one in named if one in spec.supported_options}
    if f"advantages{_SHARED}" in named:
        found["advantages_per"] = _ONE_ADVANTAGE
    if "samples" in spec.situations and "sample_mask" not in named:
        found["samples"] = _ALL_COUNT
    return found | dict(preset.options if preset is not None else {}) | given.mapping("{'temperature': lossgate.ANY}")


def _conventions(spec: Spec, head: str, named: Sequence[str], preset: Preset | None) -> Conventions:
    """Returns what callers of a plain function take care of: they give it usual numbers under the
    mask, and something that is trained. Unless it is given a count, it divides by its own.
    """
    counted = spec.outputs[0] != "loss" or not counts_of(spec, head).keys().isdisjoint(named)
    own: dict[str, Any] = {"under_mask": "usual", "untrained": "never", "counts": "given" if counted else "own"}
    return Conventions(**own | dict(preset.conventions if preset is not None else {}))


def counts_of(spec: Spec, head: str) -> dict[str, Field]:
    """Returns the counts of the whole batch, by name."""
    fields = fields_of(spec.inputs[head])
    return {name: own for name, own in fields.items() if own.count is not None or name == "valid_tokens"}


def _axes(layouts: Sequence[str]) -> tuple[Axis, ...]:
    split = {axis for layout in layouts for axis in Layout.parse(layout).axes}
    return tuple(axis for axis in AXES if axis in split) if layouts else ("dp",)


# The things of the batch


def _known(spec: Spec) -> Iterator[str]:
    """Yields the names of all that parameters can be given, at any head of a spec."""
    fields = {name: own for inputs in spec.inputs.values() for name, own in fields_of(inputs).items()}
    yield from fields
    yield from (option.name for option in spec.options)
    yield from ("int_mask", "unshifted_labels")
    if "advantages" in fields:
        yield f"advantages{_SHARED}"
    if spec.group_size == 2:
        numbers = [name for name, own in fields.items() if own.dims in (("token",), ("sequence",))]
        of_pairs = [name for name in numbers if fields[name].dtype in ("float32", "input")]
        yield from (f"{side}{name}" for side in _PAIRED for name in of_pairs)


def _check_thing(argument: Argument, thing: Any, spec: Spec) -> None:
    """Checks the name of what a parameter is given. All that is no string is a constant."""
    known = list(_known(spec))
    if isinstance(thing, str) and thing not in known:
        fields = {name: own for inputs in spec.inputs.values() for name, own in fields_of(inputs).items()}
        here = [name for name, own in fields.items() if thing in own.elsewhere]
        hint = f"here it is {here[0]!r}" if here else ""
        raise argument.error(
            f"the batch has no such thing; {nearest(thing, known, hint)}. A string that is a constant is given by "
            "functools.partial"
        )


def _base(name: str) -> str:
    """Returns the input from which a thing is made: "logprobs" for "chosen_logprobs"."""
    for prefix in _PAIRED:
        name = name.removeprefix(prefix)
    return name.removesuffix(_SHARED)


@dataclass(frozen=True)
class _Things:
    """What parameters can be given, as the function takes it.

    A function without a mask gets labels of -100 where nothing is trained.
    """

    spec: Spec
    head: str
    named: frozenset[str]
    """The names of all that the function is given."""
    rows: bool
    """Whether it takes ``[B, S, ...]`` in place of ``[T, ...]``."""

    @property
    def _fields(self) -> Mapping[str, Field]:
        return fields_of(self.spec.inputs[self.head])

    @property
    def _options(self) -> list[str]:
        return [option.name for option in self.spec.options]

    def _dim(self, name: str) -> str:
        """Returns the first dim of a field; "" if it is a number."""
        return next(iter(self._fields[name].dims), "")

    def of(self, thing: Any, inputs: Any, options: Any) -> Any:
        """Returns what a parameter is given."""
        if not isinstance(thing, str):
            return thing
        if thing in self._fields:
            return self._field(thing, inputs)
        if thing in self._options:
            return getattr(options, thing)
        if thing == "int_mask":
            return self._field("mask", inputs).long()
        if thing == "unshifted_labels":
            labels = self._laid(inputs.labels.masked_fill(~inputs.mask, _IGNORED), inputs, _IGNORED)
            return nn.functional.pad(labels, (1, 0), value=_IGNORED)[:, : labels.shape[1]]
        if thing.endswith(_SHARED):
            return inputs.per_sequence(getattr(inputs, _base(thing)))
        first = _PAIRED.index(thing.removesuffix(_base(thing)))
        return self._summed(_base(thing), inputs)[first::2]

    def _field(self, name: str, inputs: Any) -> Any:
        value = getattr(inputs, name)
        if name == "labels" and self._ignores:
            return self._laid(value.masked_fill(~inputs.mask, _IGNORED), inputs, _IGNORED)
        return self._laid(value, inputs, 0) if self._dim(name) == "token" else value

    @property
    def _ignores(self) -> bool:
        return self.spec.outputs[0] == "loss" and self.named.isdisjoint(_MASKS)

    def _laid(self, tensor: Tensor, inputs: Any, fill: float) -> Tensor:
        return inputs.to_rows(tensor, fill) if self.rows else tensor

    def _summed(self, name: str, inputs: Any) -> Tensor:
        """Returns ``[B]``: a number of each sequence, or the sum over its trained tokens."""
        value: Tensor = getattr(inputs, name)
        if self._dim(name) == "sequence":
            return value
        trained = torch.where(inputs.mask, value.float(), 0.0)
        return trained.new_zeros(inputs.sequences).index_add(0, inputs.sequence, trained)

    def returned(self, found: Any, inputs: Any) -> Any:
        """Returns the output that is judged: the function's result, or the first of several."""
        if isinstance(found, Mapping):
            found = found.get(self.spec.outputs[0], next(iter(found.values()), None))
        elif isinstance(found, tuple | list):
            found = found[0] if found else None
        if self.spec.outputs[0] == "loss":
            return found
        return Outputs(logprobs=inputs.from_rows(found) if self.rows else found)


@dataclass(frozen=True)
class PlainKernel:
    """The kernel that calls a plain function with the things of its parameters."""

    fn: Any
    mapping: Mapping[str, Any]
    """What each parameter is given."""
    by_position: Sequence[str]
    """The parameters that cannot be given by name."""
    things: _Things

    def __call__(self, inputs: Any, options: Any, mesh: Any) -> Any:
        given = {one: self.things.of(thing, inputs, options) for one, thing in self.mapping.items()}
        first = [given.pop(one) for one in self.by_position if one in given]
        return self.things.returned(self.fn(*first, **given), inputs)

    def in_own_words(self, text: str) -> str:
        """Returns what names of a text are to the function: its parameters, or counts that it is
        not given; "" if there are none.
        """
        words = {*re.findall(r"\w+", text)}
        found = [f"{thing} is {one}" for one, thing in self.mapping.items() if thing in words and thing != one]
        for name, own in counts_of(self.things.spec, self.things.head).items():
            if name in words and name not in self.mapping.values():
                found.append(f"{name} is the number of {own.meaning.partition(',')[0]}")
        return "; ".join(found)
