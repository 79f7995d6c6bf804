# SPDX-License-Identifier: Apache-2.0
"""One term of a loss that is wrong, where the others are right: one that an option weighs, or one
that a spec names in ``lossgate.Terms``.

Without the term that an option weighs, the loss is what it is with a weight of 0. So the term is
the difference, and a mistake in it alone is the right loss without it, plus the wrong loss less
the wrong one without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lossgate.base.layout import AXES, Axis
from lossgate.counterfactuals.batch_parts import all_true, bools, counts_of, edges, masks_of, reads_count, where_rows
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.families.factors import fixed, in_words, numbers
from lossgate.counterfactuals.families.option_choices import with_values
from lossgate.counterfactuals.families.sequence_pairs import with_sequences_in
from lossgate.counterfactuals.seams import Outputs, Part, Reduced, Seams, run, scaled_gradient
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec
from lossgate.specs.terms import Terms
from lossgate.specs.token_values import TokenValues


def weighted_terms(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields mistakes in the term of each option that is a weight, which may be 0."""
    weights = [o.name for o in spec.options if 0.0 in o.choices and isinstance(o.default, float)]
    for option in weights if spec.reference is not None else ():
        own, term = f"term of {option}", f"the term that {option} weighs"
        for what, combine in _FACTORS.items():
            yield mistake(f"{own} {what}", f"{term} is {what}", computed=partial(_scaled, option, combine))
        for what, number in numbers(spec, head).items():
            for side in (side for side in _IN_WORDS if what not in _IN_WORDS[side]):
                computed = partial(_scaled, option, _Combine(_ONE if side else number, number))
                yield mistake(f"{own} times {what}{side}", f"{term} is {in_words(what)}{side}", computed=computed)
        for what, fields in _mistakes(spec).items():
            computed = partial(_mistaken, option, Seams(fields=fields))
            yield mistake(f"{own}: {what}", f"in {term} {what}", computed=computed)
        yield from _of_means_and_pairs(spec, head, option)
        for what, parts in _PARTS.items():
            computed = partial(_mistaken, option, Seams(parts=parts))
            yield mistake(f"{own} {what}", f"{term} is {what}", computed=computed)


def _of_means_and_pairs(spec: Spec, head: str, option: str) -> Iterator[Counterfactual]:
    own, term = f"term of {option}", f"the term that {option} weighs"
    if spec.trained_dim == "token" and spec.group_size == 1:
        for zeroed, which in (("", ""), (head, f" (masked rows of {head} are 0)")):
            yield mistake(
                f"{own}: the plain mean over each rank's tokens{which}",
                f"{term} is the mean over all tokens of each rank, masked ones and padding too, and ranks are "
                f"averaged{which}",
                lambda setting: reads_count(setting, "valid_tokens"),
                "take the sum over trained tokens, and divide by the number that is given",
                padding=True,
                computed=partial(_plain_mean, option, zeroed),
            )
    if spec.group_size == 2 and spec.trained_dim == "token":
        words = f"{term} has both sequences of a pair, added up"
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
    """Returns what a term alone may take wrongly."""
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
    """Returns some fields of tokens, one token early."""
    return {name: setting.fields[name].roll(-1, 0) for name in names}


def _shifted_within(setting: Setting) -> Fields:
    found = _shifted(("labels", "mask"), setting)
    return {**found, "mask": found["mask"] & ~edges(setting, first=False)}


def _by_own_tokens(power: int, setting: Setting) -> list[Part]:
    own = [masks_of(setting, [rank]) for rank in range(len(setting.token_shards))]
    return [(float(masks["mask"].sum().clamp(min=1)) ** power, masks) for masks in own]


def _local_counts(ranks_too: bool, setting: Setting) -> list[Part]:
    ranks = len(setting.token_shards) if ranks_too else 1
    found: list[Part] = []
    for rank in range(len(setting.token_shards)):
        counts = {name: count * ranks for name, count in counts_of(setting, [rank]).items()}
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


_PARTS: Mapping[str, Callable[[Setting], list[Part]]] = {
    "divided by the trained tokens of each rank, beside what divides it anyway": partial(_by_own_tokens, -1),
    "multiplied by the trained tokens of each rank": partial(_by_own_tokens, 1),
    "divided by the counts of each rank's own part": partial(_local_counts, False),
    "a mean of the means of ranks": partial(_local_counts, True),
    "divided by the tokens of the longest sequence of each rank": _by_longest,
    "divided by all tokens of each rank": partial(_by_held, False),
    "divided by all tokens of each rank, padding too": partial(_by_held, True),
}


def _all_counted(setting: Setting) -> Fields:
    fields = all_true("mask", setting)
    return {**fields, **setting.spec.counts({**setting.fields, **fields})}


def _first_counts(axis: Axis, setting: Setting) -> Fields:
    return counts_of(setting, setting.group_of(0, [axis]))


@dataclass(frozen=True)
class _Combine:
    """The weight of a term in values and in gradients."""

    value: Callable[[Setting], float]
    gradient: Callable[[Setting], float]


_ONE = partial(fixed, 1.0)
_FACTORS: Mapping[str, _Combine] = {
    "subtracted, not added": _Combine(partial(fixed, -1.0), partial(fixed, -1.0)),
    "added twice": _Combine(partial(fixed, 2.0), partial(fixed, 2.0)),
    "added half": _Combine(partial(fixed, 0.5), partial(fixed, 0.5)),
    "without its gradient": _Combine(_ONE, partial(fixed, 0.0)),
}


_IN_WORDS: Mapping[str, tuple[str, ...]] = {"": ("-1", "0", "2", "1 / (2)"), " in backward": ("0",)}
"""Factors that have words of their own, or that a weight of 0 has."""


def _without(option: str, setting: Setting) -> BoundSpec:
    return with_values(setting, {option: 0.0})


def _right(setting: Setting) -> Outputs:
    return setting.once("right", lambda: run(setting))


def _right_without(option: str, setting: Setting) -> Outputs:
    return setting.once(f"right without {option}", lambda: run(setting, Seams(options=partial(_without, option))))


def _weighs(option: str, setting: Setting) -> bool:
    """Returns whether the loss grows with an option as with a weight: twice it adds twice."""
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
        # A bound may change nothing nearby, and near 0 every function is a line.
        for weight in (largest, 1e3 * largest, 1e-3 * largest):
            once, twice = loss(weight), loss(2 * weight)
            added = once - none
            if bool((twice - none - 2 * added).abs() > 1e-9 * (once.abs() + added.abs())):
                return False
    return True


def _scaled(option: str, combine: _Combine, setting: Setting) -> Outputs | None:
    factors = combine.value(setting), combine.gradient(setting)
    if not _weighs(option, setting) or factors == (1.0, 1.0):
        return None
    right, without = _right(setting), _right_without(option, setting)
    return {o: _mixed(o, right[o], without.get(o), factors) for o in right}


def _mixed(output: Output, right: Tensor, without: Tensor | None, factors: tuple[float, float]) -> Tensor:
    if output.kind == "metric" or without is None:
        return right
    factor = factors[1] if output.kind == "gradient" else factors[0]
    return torch.where(right.isfinite(), without + factor * (right - without), right)


def _mistaken(option: str, seams: Seams, setting: Setting) -> Outputs | None:
    if not _weighs(option, setting):
        return None
    right, whole, term = _right_without(option, setting), _right(setting), _term(option, seams, setting)
    if all(bool((x == 0).all()) and torch.equal(whole[o], right[o]) for o, x in term.items() if o.kind != "metric"):
        return whole  # no term is there, with the mistake or without
    kept = {o: x for o, x in right.items() if o.kind == "token value"}
    return {**kept, **{o: x if o.kind == "metric" else right[o] + x for o, x in term.items()}}


def _term(option: str, seams: Seams, setting: Setting) -> Outputs:
    """Returns what the term that an option weighs adds to the loss and to the gradients if it is
    computed with a mistake, and the metrics that come of it.
    """

    def loss(bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
        whole, metrics = bound.loss(values, fields)
        return whole - _without(option, setting).loss(values, fields)[0], metrics

    found = run(setting, replace(seams, loss=loss, upstream=_of_loss_alone))
    return {o: x for o, x in found.items() if o.kind != "token value"}


def _of_loss_alone(setting: Setting, name: str, gradient: Tensor) -> Tensor:
    return gradient if name == "loss" else torch.zeros_like(gradient)


def _exchanged(setting: Setting) -> Fields:
    """Takes the rejected sequence of each pair for the chosen one, and the other way round."""
    return with_sequences_in(torch.arange(len(setting.lengths)) ^ 1, setting)


def _of_both(option: str, setting: Setting) -> Outputs | None:
    if not _weighs(option, setting):
        return None
    term = _term(option, Seams(fields=_exchanged), setting)
    return {o: x if o.kind == "metric" or o not in term else x + term[o] for o, x in _right(setting).items()}


OfTerm = Callable[[Tensor], Tensor]


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
                loss=partial(_changed, name, change),
            )
        yield mistake(
            f"term {name}: mask ignored",
            f"in the term {name!r} of the loss the mask is ignored",
            loss=partial(_unmasked, name),
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
    returned = bound.spec(values, bound.spec.batch(fields), bound.options)
    return returned if isinstance(returned, Terms) else None


def _changed(name: str, change: OfTerm, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
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
