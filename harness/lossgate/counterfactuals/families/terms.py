# SPDX-License-Identifier: Apache-2.0
"""Terms that a spec names in ``lossgate.Terms``: a mistake in one of them alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import AXES
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import scaled_gradient
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.terms import Terms
from lossgate.specs.token_values import TokenValues

Change = Callable[[Tensor], Tensor]


def terms(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes in each term of the loss of a problem, if its spec names terms."""
    if setting.spec.reference is None:
        return
    found = _terms(setting.bound_spec, setting.bound.dense.token_values(setting.bound_spec), setting.fields)
    for name in () if found is None else found.terms:
        for what, change in _changes(setting).items():
            yield mistake(
                f"term {name} {what}",
                f"the term {name!r} of the loss is {what}",
                "term",
                loss=partial(_changed, name, change),
            )
        yield mistake(
            f"term {name}: mask ignored",
            f"in the term {name!r} of the loss the mask is ignored",
            "term",
            loss=partial(_unmasked, name),
        )
        yield mistake(
            f"term {name}: mask ignored, padding too",
            f"in the term {name!r} of the loss the mask is ignored, and padding counts too",
            "term",
            padding=True,
            loss=partial(_unmasked, name),
        )


def _changes(setting: Setting) -> Mapping[str, Change]:
    found: dict[str, Change] = {
        "subtracted, not added": torch.neg,
        "left out": torch.zeros_like,
        "added twice": partial(torch.mul, torch.tensor(2.0)),
        "added half": partial(torch.mul, torch.tensor(0.5)),
        "without its gradient": torch.Tensor.detach,
    }
    for axis in AXES:
        if (size := float(setting.size(axis))) > 1:
            found[f"multiplied by {axis}"] = partial(torch.mul, torch.tensor(size))
            found[f"multiplied by {axis} in backward"] = partial(scaled_gradient, factor=size)
    return found


def _terms(bound: BoundSpec, values: TokenValues, fields: Fields) -> Terms | None:
    returned = bound.spec(values, bound.spec.batch(fields), bound.options)
    return returned if isinstance(returned, Terms) else None


Reduced = tuple[Tensor, dict[str, Tensor]]


def _changed(name: str, change: Change, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    found = _terms(bound, values, fields)
    assert found is not None
    term = replace(found.terms[name], values=change(found.terms[name].values))
    return replace(found, terms={**found.terms, name: term}).loss, dict(found.metrics)


def _unmasked(name: str, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    found = _terms(bound, values, fields)
    wrong = _terms(bound, values, {**fields, "mask": torch.ones_like(fields["mask"])})
    assert found is not None
    assert wrong is not None
    return replace(found, terms={**found.terms, name: wrong.terms[name]}).loss, dict(found.metrics)
