# SPDX-License-Identifier: Apache-2.0
"""Writes classes for the inputs and options of the built-in specs, for editors and type checkers.

Their docstrings say everything that the author of a kernel needs.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from inspect import cleandoc
from textwrap import indent, wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lossgate.base.layout import AXES
from lossgate.declaration.contract import Contract
from lossgate.losses import SPECS
from lossgate.reports.spec_sections import drawn_by_problems, made_of_ranks, parts_of
from lossgate.specs.heads import HEADS
from lossgate.specs.option import Option
from lossgate.specs.outputs import RETURNED, Output, gradient_output
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Field, fields_of
from lossgate.specs.spec import Spec

_WRITTEN = '''# SPDX-License-Identifier: Apache-2.0
# Written by python -m lossgate.reports.spec_files: change the specs, and run that.
"""{}"""
'''
_WIDTH = 93
"""The width of docstrings in a class, without their indentation and quotes."""


# Inputs


def inputs_stub() -> Iterator[str]:
    """Yields the lines of ``lossgate/inputs.pyi``.

    The fields of each head, and the fields that all batches share, are in classes of their own. The
    other classes inherit from these, and authors of specs use these, too.
    """
    yield _WRITTEN.format("What a kernel is given on each rank: a class for each spec and head.")
    yield "from torch import Tensor"
    yield ""
    batches = dict.fromkeys(spec.batch_type for spec in SPECS.values() if spec.batch_type is not Batch)
    heads = [head.inputs for head in HEADS.values()]
    yield from sorted([*map(_public, batches), *map(_aliased, [*heads, Batch])])
    for kind in (Batch, *heads):
        yield from _inputs_class(kind, [f"_{kind.__name__}"], cleandoc(kind.__doc__ or ""), fields_of(kind))
    for spec in SPECS.values():
        for head, kind in spec.inputs.items():
            known = {**fields_of(Batch), **fields_of(HEADS[head].inputs)}
            own = {name: field for name, field in fields_of(kind).items() if field != known.get(name)}
            bases = dict.fromkeys(base.__name__ for base in (*kind.__bases__, Batch))
            yield from _inputs_class(kind, bases, _of_inputs(spec, head), own)
    yield ""


def _inputs_class(kind: type, bases: Iterable[str], doc: str, own: dict[str, Field]) -> Iterator[str]:
    yield from ("", f"class {kind.__name__}({', '.join(bases)}):")
    yield from _docstring(doc)
    types = get_type_hints(kind)
    for name, field in own.items():
        yield from ("", f"    {name}: {_type(types[name])}")
        yield from _docstring(_of_field(name, field))


def _of_inputs(spec: Spec, head: str) -> str:
    """Returns the docstring of the inputs of a spec at a head."""
    used = parts_of(dim for field in fields_of(spec.inputs[head]).values() for dim in field.dims)
    gradients = ", ".join(f"inputs.{leaf}.grad" for leaf in HEADS[head].leaves)
    returned = (f"``{name}``: {_shape(RETURNED[name].dims)}; {_together(RETURNED[name])}." for name in spec.outputs)
    return "\n".join(
        (
            *_paragraph(f'What a kernel of spec {spec.name} gets on a rank at head "{head}": {HEADS[head].meaning}.'),
            "",
            *_paragraph(f"{spec.name}: {spec.summary}."),
            "",
            *_paragraph("The part of each dim that a rank has; all of it if the layout does not split the dim:"),
            "",
            *_items(f"{name}: {part.meaning}." for name, part in used.items()),
            "",
            *_paragraph(
                f"The kernel returns {_returns(spec)}, in float32 unless "
                f"``lossgate.Precision`` declares otherwise; backward leaves the gradients in {gradients}. Unless "
                "``lossgate.Contract`` declares otherwise:"
            ),
            "",
            *_items(returned),
            "",
            *_paragraph(
                f"``lossgate list {spec.name}`` also shows the metrics. The options are "
                f"``lossgate.options.{spec.options_type.__name__}``."
            ),
        )
    )


def _returns(spec: Spec) -> str:
    if spec.outputs[0] == "loss":
        return "the loss alone, or ``lossgate.Outputs`` with more of these"
    return "``lossgate.Outputs`` with the first of these at least"


def _of_field(name: str, field: Field) -> str:
    texts = [field.described]
    texts += [f"{dim}, on a rank: {part.meaning}." for dim, part in parts_of(field.dims).items()]
    if field.dtype == "input":
        texts.append(f"Its gradients: {_together(gradient_output(name, field.dims))}.")
    return "\n\n".join("\n".join(_paragraph(text)) for text in texts)


_WAYS = {
    "sum": "lossgate adds up the results of {} ranks",
    "split": "each {} rank has its own part",
    "replicate": "each {} rank has the same",
}


def _together(output: Output) -> str:
    made = dict(zip(AXES, made_of_ranks(output, Contract()), strict=True))
    axes = {way: [axis for axis in AXES if made[axis] == way] for way in _WAYS}
    return "; ".join(_WAYS[way].format(" and ".join(some)) for way, some in axes.items() if some)


def _shape(dims: tuple[str, ...]) -> str:
    return f"[{', '.join(dims)}]" if dims else "a scalar"


# Options


def options_stub() -> Iterator[str]:
    """Yields the lines of ``lossgate/options.pyi``."""
    yield _WRITTEN.format("The options of each spec, as a kernel is given them.")
    yield "from typing import Literal"
    yield ""
    yield from sorted(_aliased(spec.options_type) for spec in SPECS.values())
    for spec in SPECS.values():
        yield from _options_class(spec)
    yield ""


def _options_class(spec: Spec) -> Iterator[str]:
    kind = spec.options_type
    types, own = get_type_hints(kind), fields(kind)
    options = {option.name: option for option in spec.options}
    yield ""
    yield f"class {kind.__name__}(_{kind.__name__}):"
    said = f"The options of spec {spec.name}: {spec.summary}."
    kept = "An option that a candidate does not name in ``supports`` keeps its default."
    yield from _docstring("\n".join((*_paragraph(said), "", *_paragraph(kept))))
    for field in own:
        yield from ("", f"    {field.name}: {_type(types[field.name])} = {_literal(field.default)}")
        yield from _docstring("\n".join(_of_option(options[field.name])))


def _of_option(option: Option) -> list[str]:
    line = f"Default: {option.default!r}. Problems draw: {drawn_by_problems(option)}."
    return [*_paragraph(f"{option.meaning}."), "", line]


# Text


def _public(kind: type) -> str:
    return f"from {kind.__module__} import {kind.__name__} as {kind.__name__}"


def _aliased(kind: type) -> str:
    return f"from {kind.__module__} import {kind.__name__} as _{kind.__name__}"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(_literal, get_args(annotation)))}]"
    if parts := get_args(annotation):
        return " | ".join(map(_type, parts))
    return "None" if annotation is type(None) else annotation.__name__


def _paragraph(text: str) -> list[str]:
    return wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _items(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from wrap(f"- {text}", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _docstring(text: str) -> Iterator[str]:
    if "\n" not in text and len(text) <= _WIDTH - 3:
        yield f'    """{text}"""'
        return
    yield indent(f'"""{text}\n"""', "    ")
