# SPDX-License-Identifier: Apache-2.0
"""Mistakes in one term of a loss, while the other terms are right. An option weighs the term, or a
spec names it in ``lossgate.Terms``.

With a weight of 0, the loss lacks the term that an option weighs. So the term is the difference of
the loss with and without its weight. A loss with a mistake in the term alone is the right loss
without the term, plus the difference that is computed with the mistake.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
from lossgate.counterfactuals.batch_parts import all_true, bools, counts_of, edges, masks_of, reads_count, where_rows
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.factors import Number, fixed, in_words, numbers
from lossgate.counterfactuals.families.option_values import with_values
from lossgate.counterfactuals.families.sequence_pairs import with_sequences_in
from lossgate.counterfactuals.seams import Outputs, Part, Reduced, Seams, run, scaled_gradient
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.spec import Spec
from lossgate.specs.terms import Terms
from lossgate.specs.token_values import TokenValues


def weighted_terms(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields mistakes in the term of each option that is a weight and may be 0."""
    if spec.reference is None:
        return
    for option in (o.name for o in spec.options if 0.0 in o.choices and isinstance(o.default, float)):
        own, term = f"term of {option}", f"the term that {option} weighs"
        for what, (value, gradient) in _FACTORS.items():
            computed = partial(_scaled, option, partial(fixed, value), partial(fixed, gradient))
            yield mistake(f"{own} {what}", f"{term} {_said(what)}", computed=computed)
        for what, number in numbers(spec, head).items():
            if what not in ("-1", "0", "2", "1 / (2)"):  # _FACTORS has these, or they are a weight of 0
                computed = partial(_scaled, option, number, number)
                yield mistake(f"{own} times {what}", f"{term} is {in_words(what)}", computed=computed)
            if what != "0":  # that is the term without its gradient
                name, words = f"{own} times {what} in backward", f"{term} is {in_words(what)} in backward"
                yield mistake(name, words, computed=partial(_scaled, option, partial(fixed, 1.0), number))
        for what, fields in _mistakes(spec).items():
            computed = partial(_mistaken, option, Seams(fields=fields))
            yield mistake(f"{own}: {what}", f"in {term}, {what}", computed=computed)
        yield from _of_means_and_pairs(spec, head, option)
        for what, (words, parts) in _PARTS.items():
            computed = partial(_mistaken, option, Seams(parts=parts))
            yield mistake(f"{own} {what}", f"{term} is {words}", computed=computed)


def _of_means_and_pairs(spec: Spec, head: str, option: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of a term that is a plain mean, or that has both sequences of a pair."""
    own, term = f"term of {option}", f"the term that {option} weighs"
    if spec.trained_dim == "token" and spec.group_size == 1:
        for zeroed, which in (("", ""), (head, f" (masked rows of {head} are 0)")):
            yield mistake(
                f"{own}: the plain mean over each rank's tokens{which}",
                f"{term} is the mean over all tokens of each rank, masked tokens and padding included, averaged over "
                f"the ranks{which}",
                lambda setting: reads_count(setting, "valid_tokens"),
                "sum over the trained tokens, and divide by the count that is given",
                padding=True,
                computed=partial(_plain_mean, option, zeroed),
            )
    if spec.group_size == 2 and spec.trained_dim == "token":
        words = f"{term} is computed of both sequences of a pair, and the two are added up"
        yield mistake(f"{own}: of both sequences", words, computed=partial(_of_both, option))


def _plain_mean(option: str, zeroed: str, setting: Setting) -> Outputs | None:
    ranks, parts, given = setting.token_shards, list[Part](), setting.fields["valid_tokens"]
    for rank, held in enumerate(ranks):
        count = torch.tensor(max(len(held), 1) * len(ranks)).to(given)
        parts.append((1.0, {**masks_of(setting, [rank]), "mask": setting.mask_of(held), "valid_tokens": count}))
    seams = Seams(parts=lambda setting: parts)
    return _mistaken(option, replace(seams, leaves=partial(_of_zeros, zeroed)) if zeroed else seams, setting)


def _of_zeros(name: str, setting: Setting, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**leaves, name: where_rows(setting.fields["mask"], leaves[name], 0.0)}


def _mistakes(spec: Spec) -> Mapping[str, Callable[[Setting], Fields]]:
    """Returns, by their words, the mistakes that a term alone may have. Each returns fields."""
    found: dict[str, Callable[[Setting], Fields]] = {}
    for name in (name for name in bools(spec) if name != "mask"):
        found[f"{name} is ignored"] = partial(all_true, name)
    if spec.trained_dim == "token":
        found["the mask is ignored"] = partial(all_true, "mask")
        found["the mask is ignored, and counts are those of all tokens"] = _all_counted
        found["labels are shifted twice"] = partial(_shifted, ("labels",))
        found["labels and mask are shifted twice"] = partial(_shifted, ("labels", "mask"))
        found["labels and mask are shifted twice, within each sequence"] = _shifted_within
    for axis in ("dp", "cp"):
        found[f"counts are those of one rank of {axis}"] = partial(_first_counts, axis)
    return found


def _shifted(names: tuple[str, ...], setting: Setting) -> Fields:
    """Returns some fields of tokens, shifted once more."""
    return {name: setting.fields[name].roll(-1, 0) for name in names}


def _shifted_within(setting: Setting) -> Fields:
    found = _shifted(("labels", "mask"), setting)
    return {**found, "mask": found["mask"] & ~edges(setting, first=False)}


def _by_own_tokens(power: int, setting: Setting) -> list[Part]:
    own = [masks_of(setting, [rank]) for rank in range(len(setting.token_shards))]
    return [(float(masks["mask"].sum().clamp(min=1)) ** power, masks) for masks in own]


def _local_counts(ranks_too: bool, setting: Setting) -> list[Part]:
    factor = len(setting.token_shards) if ranks_too else 1
    found: list[Part] = []
    for rank in range(len(setting.token_shards)):
        counts = {name: count * factor for name, count in counts_of(setting, [rank]).items()}
        found.append((1.0, {**masks_of(setting, [rank]), **counts}))
    return found


def _by_longest(setting: Setting) -> list[Part]:
    found: list[Part] = []
    for rank, held in enumerate(setting.token_shards):
        longest = setting.fields["sequence"][held].bincount().max() if len(held) else 1
        found.append((1 / float(longest), masks_of(setting, [rank])))
    return found


def _by_held(padding: bool, setting: Setting) -> list[Part]:
    held = setting.held_by_ranks if padding else [len(tokens) for tokens in setting.token_shards]
    like = setting.fields["valid_tokens"]
    return [
        (1.0, {**masks_of(setting, [rank]), "valid_tokens": torch.tensor(max(count, 1)).to(like)})
        for rank, count in enumerate(held)
    ]


_PARTS: Mapping[str, tuple[str, Callable[[Setting], list[Part]]]] = {
    "divided by the trained tokens of each rank, beside what divides it anyway": (
        "divided by the number of trained tokens of each rank, in addition to its right divisor",
        partial(_by_own_tokens, -1),
    ),
    "multiplied by the trained tokens of each rank": (
        "multiplied by the number of trained tokens of each rank",
        partial(_by_own_tokens, 1),
    ),
    "divided by the counts of each rank's own part": (
        "divided by the counts of each rank's own part",
        partial(_local_counts, False),
    ),
    "a mean of the means of ranks": ("a mean of the means of ranks", partial(_local_counts, True)),
    "divided by the tokens of the longest sequence of each rank": (
        "divided by the number of tokens of the longest sequence of each rank, in addition to its right divisor",
        _by_longest,
    ),
    "divided by all tokens of each rank": (
        "divided by the number of all tokens of each rank, not of trained ones",
        partial(_by_held, False),
    ),
    "divided by all tokens of each rank, padding too": (
        "divided by the number of all tokens of each rank, padding included, not of trained ones",
        partial(_by_held, True),
    ),
}
"""The wrong divisors of a term, each in words and as the parts of the loss."""


def _all_counted(setting: Setting) -> Fields:
    fields = all_true("mask", setting)
    return {**fields, **setting.spec.counts({**setting.fields, **fields})}


def _first_counts(axis: Axis, setting: Setting) -> Fields:
    return counts_of(setting, setting.group_of(0, [axis]))


_FACTORS: Mapping[str, tuple[float, float]] = {
    "subtracted, not added": (-1.0, -1.0),
    "added twice": (2.0, 2.0),
    "added half": (0.5, 0.5),
    "without its gradient": (1.0, 0.0),
}
"""The wrong factors of a term in values and in gradients."""


def _said(what: str) -> str:
    """Returns the words for a change to a term, given the name of the change."""
    return {"added half": "has half its weight", "without its gradient": "has no gradient"}.get(what, f"is {what}")


def _without(option: str, setting: Setting) -> BoundSpec:
    return with_values(setting, {option: 0.0})


def _right(setting: Setting) -> Outputs:
    return setting.once("right", lambda: run(setting))


def _right_without(option: str, setting: Setting) -> Outputs:
    return setting.once(f"right without {option}", lambda: run(setting, Seams(options=partial(_without, option))))


def _weighs(option: str, setting: Setting) -> bool:
    """Returns whether an option weighs a term: twice the option adds twice as much to the loss."""
    return setting.once(f"{option} weighs", lambda: _adds_in_proportion(option, setting))


def _adds_in_proportion(option: str, setting: Setting) -> bool:
    if not getattr(setting.bound_spec.options, option):
        return False
    values = setting.bound.dense.token_values(setting.bound_spec)

    def loss(weight: float) -> Tensor:
        return with_values(setting, {option: weight}).loss(values, setting.bound.batch.known)[0]

    largest = max(setting.spec.supported_options[option].choices)
    with torch.no_grad():
        none = loss(0.0)
        # Small weights alone do not tell, as every function is a line near 0. An option that bounds
        # something may change nothing at large ones.
        for weight in (largest, 1e3 * largest, 1e-3 * largest):
            once, twice = loss(weight), loss(2 * weight)
            added = once - none
            if bool((twice - none - 2 * added).abs() > 1e-9 * (once.abs() + added.abs())):
                return False
    return True


def _scaled(option: str, value: Number, gradient: Number, setting: Setting) -> Outputs | None:
    """Returns the outputs of a kernel that multiplies a term by one factor, and its gradient by
    another. None if the option weighs no term, or if both factors are 1.
    """
    of_value, of_gradient = value(setting), gradient(setting)
    if not _weighs(option, setting) or of_value == of_gradient == 1.0:
        return None
    found, without = dict(_right(setting)), _right_without(option, setting)
    for output, right in _right(setting).items():
        if output.kind != "metric" and output in without:
            factor = of_gradient if output.kind == "gradient" else of_value
            scaled = without[output] + factor * (right - without[output])
            found[output] = torch.where(right.isfinite(), scaled, right)
    return found


def _mistaken(option: str, seams: Seams, setting: Setting) -> Outputs | None:
    """Returns the outputs of a kernel with a mistake in the term that an option weighs."""
    if not _weighs(option, setting):
        return None
    right, without, term = _right(setting), _right_without(option, setting), _term(option, seams, setting)
    added = {output: x for output, x in term.items() if output.kind != "metric"}
    if all(bool((x == 0).all()) and torch.equal(right[output], without[output]) for output, x in added.items()):
        return right  # the term is 0, with the mistake and without it
    token_values = {output: x for output, x in without.items() if output.kind == "token value"}
    return {**token_values, **term, **{output: without[output] + x for output, x in added.items()}}


def _term(option: str, seams: Seams, setting: Setting) -> Outputs:
    """Computes the term that an option weighs with a mistake.

    Returns what the term adds to the loss and to the gradients, and the metrics of the whole loss.
    """

    def loss(bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
        whole, metrics = bound.loss(values, fields)
        return whole - _without(option, setting).loss(values, fields)[0], metrics

    found = run(setting, replace(seams, loss=loss, upstream=_of_loss_alone))
    return {o: x for o, x in found.items() if o.kind != "token value"}


def _of_loss_alone(setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return gradient if name == "loss" else torch.zeros_like(gradient)


def _exchanged(setting: Setting) -> Fields:
    """Returns fields in which the two sequences of each pair are exchanged."""
    return with_sequences_in(torch.arange(len(setting.lengths)) ^ 1, setting)


def _of_both(option: str, setting: Setting) -> Outputs | None:
    if not _weighs(option, setting):
        return None
    found, term = dict(_right(setting)), _term(option, Seams(fields=_exchanged), setting)
    return found | {output: found[output] + x for output, x in term.items() if output.kind != "metric"}


OfTerm = Callable[[Tensor], Tensor]


def terms(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes in each term of the loss of a problem, if its spec names terms."""
    if setting.spec.reference is None:
        return
    found = _terms(setting.bound_spec, setting.bound.dense.token_values(setting.bound_spec), setting.fields)
    if found is None:
        return
    for name in found.terms:
        for what, change in _changes(setting).items():
            yield mistake(
                f"term {name} {what}",
                f"the term {name!r} of the loss {_said(what)}",
                loss=partial(_changed, name, change),
            )
        for also, in_metrics in (("", False), (", and in metrics", True)):
            yield mistake(
                f"term {name}: mask ignored{also}",
                f"in the term {name!r} of the loss{also} the mask is ignored",
                loss=partial(_unmasked, name, in_metrics=in_metrics),
            )
        yield mistake(
            f"term {name}: mask ignored, padding too",
            f"in the term {name!r} of the loss the mask is ignored, and padding counts too",
            padding=True,
            loss=partial(_unmasked, name),
        )


def _changes(setting: Setting) -> Mapping[str, OfTerm]:
    found: dict[str, OfTerm] = {
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
    """Returns the terms of a loss; None if its spec names none."""
    returned = bound.spec(values, bound.spec.batch(fields), bound.options)
    return returned if isinstance(returned, Terms) else None


def _changed(name: str, change: OfTerm, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    found = _terms(bound, values, fields)
    assert found is not None
    term = replace(found.terms[name], values=change(found.terms[name].values))
    return replace(found, terms={**found.terms, name: term}).loss, dict(found.metrics)


def _unmasked(name: str, bound: BoundSpec, values: TokenValues, fields: Fields, *, in_metrics: bool = False) -> Reduced:
    found = _terms(bound, values, fields)
    wrong = _terms(bound, values, {**fields, "mask": torch.ones_like(fields["mask"])})
    assert found is not None
    assert wrong is not None
    metrics = dict((wrong if in_metrics else found).metrics)
    return replace(found, terms={**found.terms, name: wrong.terms[name]}).loss, metrics
