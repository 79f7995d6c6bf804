# SPDX-License-Identifier: Apache-2.0
"""Mistakes in single operations of a reference: an operation is left out, changed, or loses its
gradient.

Every loss has them, even one that declares nothing but its inputs. A run of the reference shows its
operations. A mistake names the expression of the reference that the kernel computes differently.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake, split
from lossgate.counterfactuals.families.rounded import to_bfloat16
from lossgate.counterfactuals.seams import Outputs, Reduced, Seams, run, scaled_gradient, with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.counterfactuals.sites import Attached, Changed, Rewrite, Site, Traced
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.token_values import TokenValues

OPERATION = "operation"
"""The kind of these mistakes."""
_BOUNDS = (10.0, 20.0)
"""Usual bounds of log-ratios, in nats."""
_LARGEST = torch.finfo(torch.float32).max
_NOT_STOPPED = "the gradient is not stopped"


def operations(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes of each operation in the loss of a problem."""
    if setting.spec.reference is not None:
        yield from (replace(one, kind=OPERATION) for one in _operations(setting))


def _operations(setting: Setting) -> Iterator[Counterfactual]:
    traced = _traced(setting)
    for site in traced.sites:
        changes = {**_CHANGES.get(site.operation, {}), **_ROUNDED.get(site.operation, {})}
        for what, rewrite in changes.items():
            yield _otherwise(site, _with_number(what) if traced.takes_number(site) else what, rewrite)
        if site.operation == "sub" and "logprobs" in setting.spec.uses:
            for which, side in enumerate(("on the left", "on the right")):
                yield mistake(
                    f"{_name(site)}: the policy's own log-probabilities {side}",
                    f"in {_code(site)}, the policy's own detached log-probabilities stand {side} of the minus",
                    loss=partial(_with_policy, site, which),
                )
        if site.operation == "log_softmax":
            yield from _softmaxes(site)
    yield from _of_two_stops(traced)
    yield from _attached(traced)
    if traced.of_kind("log_softmax"):
        yield from _softmaxes(None)


def stops(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes of operations that should stop the gradient, and do not."""
    if setting.spec.reference is None:
        return
    traced = _traced(setting)
    yield from map(_not_stopped, traced.of_kind("detach"))
    yield from _of_two_stops(traced)
    yield from _attached(traced)


def _traced(setting: Setting) -> Traced:
    values = setting.bound.dense.token_values(setting.bound_spec)
    with Traced() as traced:
        setting.bound_spec.loss(values, setting.fields)
    return traced


def _softmaxes(site: Site | None) -> Iterator[Counterfactual]:
    """Yields the mistakes of the log_softmax at a site. None stands for every one over the whole
    vocabulary.
    """
    name = "every log_softmax" if site is None else _name(site)
    where = "every softmax over the vocabulary" if site is None else f"the softmax of {_code(site)}"
    for what, in_shards in _IN_SHARDS.items():
        yield Counterfactual(
            name=f"{name}: {what}",
            sentence=f"in {where}, {what}",
            applies=split("tp") if site is not None else lambda setting: True,
            computed=partial(_in_shards, site, in_shards),
        )


def _of_two_stops(traced: Traced) -> Iterator[Counterfactual]:
    """Yields the mistakes of stopping the gradient at neither of two places."""
    for one, other in combinations(traced.of_kind("detach"), 2):
        yield replace(
            mistake(
                f"{_name(one)} and {_name(other)}: neither stops it",
                f"the gradient is stopped neither in {_code(one)} nor in {_code(other)}",
                loss=partial(_loss_of_two, one, other),
            ),
            made_of=(_not_stopped(one), _not_stopped(other)),
        )


def _attached(traced: Traced) -> Iterator[Counterfactual]:
    """Yields the mistakes of not detaching a value in one of its uses."""
    uses = Counter(stop for stop, _ in traced.uses)
    for stop, use in traced.uses:
        if uses[stop] == 1:
            continue  # it is the same as not to stop the gradient at all
        alone = mistake(
            f"{_name(stop)}: not in {_name(use)}",
            f"the value that {_code(stop)} detaches keeps its gradient in {_code(use)}",
            loss=partial(_loss_attached, stop, use, None),
        )
        yield alone
        for later in (site for site in traced.of_kind("detach") if site != stop):
            both = mistake(
                f"{alone.name} and {_name(later)}",
                f"{alone.sentence}, and this gradient is not stopped in {_code(later)} either",
                loss=partial(_loss_attached, stop, use, later),
            )
            yield replace(both, made_of=(alone, _not_stopped(later)))


def _otherwise(site: Site, what: str, rewrite: Rewrite) -> Counterfactual:
    differs = f"in the kernel {what}" if " is " in what else f"the {site.operation} of the kernel differs: {what}"
    sentence = f"where the reference computes {_code(site)}, {differs}"
    return mistake(f"{_name(site)}: {what}", sentence, loss=partial(_loss, site, rewrite))


def _not_stopped(site: Site) -> Counterfactual:
    return _otherwise(site, _NOT_STOPPED, _first)


def _name(site: Site) -> str:
    return f"{Path(site.file).stem}.{site.function} `{site.code}` {site.operation}"


def _code(site: Site) -> str:
    """Returns the code of a site with its function and its file."""
    return f"`{site.code}` (in {site.function}, {site.file})"


def _with_number(what: str) -> str:
    """Returns the words for an operation with a number, which may be either argument."""
    for argument, words in _NUMBERS.items():
        what = what.replace(argument, words)
    return what


_NUMBERS: Mapping[str, str] = {
    "the second factor": "the number",
    "the first factor": "what is multiplied by the number",
    "the second summand": "the number",
    "the first summand": "what the number is added to",
}


def _loss(site: Site | None, rewrite: Rewrite, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    with Changed(site, rewrite):
        return bound.loss(values, fields)


def _loss_of_two(one: Site, other: Site, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    with Changed(one, _first), Changed(other, _first):
        return bound.loss(values, fields)


def _loss_attached(
    stops: Site, use: Site, later: Site | None, bound: BoundSpec, values: TokenValues, fields: Fields
) -> Reduced:
    with Attached(stops, use, later):
        return bound.loss(values, fields)


def _with_policy(site: Site, which: int, bound: BoundSpec, values: TokenValues, fields: Fields) -> Reduced:
    policy = values.logprobs.detach()

    def rewrite(found: Tensor, args: tuple[Any, ...]) -> Tensor:
        sides = [_tensor(x, found) for x in args[:2]]
        if found.shape == policy.shape:
            sides[which] = policy
        return sides[0] - sides[1]

    return _loss(site, rewrite, bound, values, fields)


InShards = Callable[[Tensor, Sequence[slice], float], Sequence[Tensor]]
"""Gets tempered logits, the rows of each tp rank and the temperature. Returns the log-softmax of
the rows of each rank."""


def _in_shards(site: Site | None, log_softmax: InShards, setting: Setting) -> Outputs:
    shards = [slice(shard.start, shard.end) for shard in setting.vocab_shards]

    def rewrite(found: Tensor, args: tuple[Any, ...]) -> Tensor:
        if found.shape[-1] != shards[-1].stop:
            return found  # it is not over the whole vocabulary
        return torch.cat(list(log_softmax(args[0], shards, setting.temperature)), -1)

    return run(setting, Seams(loss=partial(_loss, site, rewrite)))


def _own_normaliser(x: Tensor, shards: Sequence[slice], temperature: float) -> list[Tensor]:
    return [torch.log_softmax(x[..., rows], -1) for rows in shards]


def _gradient_of_own_rows(x: Tensor, shards: Sequence[slice], temperature: float) -> list[Tensor]:
    normaliser, shares = x.detach().logsumexp(-1, keepdim=True), x.detach().softmax(-1)
    own = ((shares[..., rows] * x[..., rows]).sum(-1, keepdim=True) for rows in shards)
    return [x[..., rows] - with_gradient_of(normaliser, of_rows) for rows, of_rows in zip(shards, own, strict=True)]


def _gradient_summed_again(x: Tensor, shards: Sequence[slice], temperature: float) -> list[Tensor]:
    normaliser = scaled_gradient(x.logsumexp(-1, keepdim=True), len(shards))
    return [x[..., rows] - normaliser for rows in shards]


def _constant_normaliser(x: Tensor, shards: Sequence[slice], temperature: float) -> list[Tensor]:
    normaliser = x.detach().logsumexp(-1, keepdim=True)
    return [x[..., rows] - normaliser for rows in shards]


def _untempered(x: Tensor, shards: Sequence[slice], temperature: float) -> list[Tensor]:
    softmax = (x * temperature).detach().softmax(-1)
    normaliser = with_gradient_of(x.logsumexp(-1, keepdim=True), (softmax * x).sum(-1, keepdim=True))
    return [x[..., rows] - normaliser for rows in shards]


_IN_SHARDS: Mapping[str, InShards] = {
    "backward takes the softmax of logits that are not divided by the temperature": _untempered,
    "the normaliser is that of each rank's own rows: it is not reduced over tp": _own_normaliser,
    "the gradient of the normaliser is that of each rank's own rows: it is not summed over tp": _gradient_of_own_rows,
    "the gradient of the normaliser is summed over tp once too often": _gradient_summed_again,
    "the normaliser has no gradient": _constant_normaliser,
}
"""The mistakes of a softmax. Most of them need a vocabulary that ranks share."""


def _tensor(x: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=like.dtype).expand_as(like)


def _first(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return _tensor(args[0], found)


def _second(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return _tensor(args[1], found)


def _detached(which: int, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the product, but without the gradient of one factor."""
    factors = [_tensor(x, found) for x in args[:2]]
    factors[which] = factors[which].detach()
    return factors[0] * factors[1]


def _without_divisor(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return _tensor(args[0], found) / _tensor(args[1], found).detach()


def _straight_through(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return with_gradient_of(found, _tensor(args[0], found))


def _weighted(of: Callable[..., Tensor], which: int, weight: float, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns a maximum or minimum with one argument multiplied by a weight."""
    first, second = args[:2]
    return of(weight * first, second) if which == 0 else of(first, weight * second)


def _bounded_on_one_side(which: int, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the argument with one of two bounds: the lower if ``which`` is 1, else the upper."""
    if len(args) < 3 or args[1] is None or args[2] is None:
        return found
    return (
        torch.maximum(args[0], _tensor(args[1], found))
        if which == 1
        else torch.minimum(args[0], _tensor(args[2], found))
    )


def _clamped(bound: float, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return args[0].clamp(-bound, bound) if len(args) == 3 and args[1] == -args[2] else found


def _of_bounded(bound: float, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    of = torch.expm1 if torch.allclose(found, args[0].expm1(), equal_nan=True) else torch.exp
    return of(args[0].clamp(-bound, bound))


def where_it_overflows(number: float, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the result of an operation with a number where float32 would be infinite."""
    return torch.where(found > _LARGEST, number, found)


def _slope_at_result(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return with_gradient_of(found, args[0] * (1 - found.tanh() ** 2).detach())


def _signed(first: float, second: float, found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the sum of the two arguments, with the given factors."""
    return first * _tensor(args[0], found) + second * _tensor(args[1], found)


def _from_one(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the product with 1 - w in place of a factor w, if w is a weight between 0 and 1."""
    first, second = args[:2]
    for weight, other in ((first, second), (second, first)):
        number = torch.as_tensor(weight)
        if number.numel() == 1 and number.is_floating_point():
            found = torch.where((number > 0) & (number < 1), (1 - weight) * other, found)
    return found


def _mean_of_logs(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the weighted mean of two log-distributions.

    Each argument is a log-distribution plus the logarithm of its weight.
    """
    weights = [x.detach().logsumexp(-1, keepdim=True) for x in args[:2]]
    return torch.stack([w.exp() * (x - w) for x, w in zip(args[:2], weights, strict=True)]).sum(0)


def _weights_exchanged(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the logarithm of a mixture of distributions, each with the weight of the other."""
    one, other = (x.detach().logsumexp(-1, keepdim=True) for x in args[:2])
    return torch.logaddexp(args[0] - one + other, args[1] - other + one)


def _in_bfloat16(of: Callable[..., Tensor], found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns the rounded result of an operation on its two rounded arguments."""
    return to_bfloat16(of(*(to_bfloat16(_tensor(x, found)) for x in args[:2])))


_RESULT: Mapping[str, Rewrite] = {"its result is rounded to bfloat16": lambda found, args: to_bfloat16(found)}
_ROUNDED: Mapping[str, Mapping[str, Rewrite]] = {
    **dict.fromkeys(("log", "exp", "sum", "log_softmax", "logsigmoid", "tanh", "pow"), _RESULT),
    **{
        name: {**_RESULT, "it is done in bfloat16": partial(_in_bfloat16, of)}
        for name, of in (("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("div", torch.div))
    },
}
"""The ways in which an operation may round more than it should."""
_NO_GRADIENT: Mapping[str, Rewrite] = {"without its gradient": lambda found, args: found.detach()}
_LEFT_OUT: Mapping[str, Rewrite] = {"left out": _first, **_NO_GRADIENT}
_BOOL: Mapping[str, Rewrite] = {"the second condition is left out": _first, "the first condition is left out": _second}


def _of_two(taken: Callable[..., Tensor], other: str, instead: Callable[..., Tensor]) -> Mapping[str, Rewrite]:
    """Returns the mistakes of a maximum or a minimum."""
    weighted = {
        f"the {place} is {what}": partial(_weighted, taken, which, weight)
        for which, place in enumerate(("first", "second"))
        for weight, what in ((2.0, "doubled"), (0.5, "halved"))
    }
    return {
        **weighted,
        other: lambda found, args: instead(args[0], args[1]),
        "always the first": _first,
        "always the second": _second,
        **_NO_GRADIENT,
    }


_CHANGES: Mapping[str, Mapping[str, Rewrite]] = {
    "and": _BOOL,
    "or": _BOOL,
    "comparison": {
        "it is turned round": lambda found, args: ~found,
        "equal numbers count otherwise": lambda found, args: found ^ (args[0] == args[1]),
        "it is taken for true": lambda found, args: torch.ones_like(found),
        "it is taken for false": lambda found, args: torch.zeros_like(found),
    },
    "detach": {_NOT_STOPPED: _first},
    "clamp": {
        **_LEFT_OUT,
        "left out in backward": _straight_through,
        "the lower bound is left out": partial(_bounded_on_one_side, 2),
        "the upper bound is left out": partial(_bounded_on_one_side, 1),
        **{f"the bounds are -{x:g} and {x:g}": partial(_clamped, x) for x in _BOUNDS},
    },
    "maximum": _of_two(torch.maximum, "the smaller is taken", torch.minimum),
    "minimum": _of_two(torch.minimum, "the larger is taken", torch.maximum),
    "neg": {"the sign is left out": _first},
    "mul": {
        "the second factor is left out": _first,
        "the first factor is left out": _second,
        "the weight is taken from 1": _from_one,
        "the first factor has no gradient": partial(_detached, 0),
        "the second factor has no gradient": partial(_detached, 1),
        **_NO_GRADIENT,
    },
    "div": {
        "the division is left out": _first,
        "what is divided by has no gradient": _without_divisor,
        **_NO_GRADIENT,
    },
    "add": {
        "the second summand is left out": _first,
        "the first summand is left out": _second,
        "the second summand is subtracted": partial(_signed, 1, -1),
        "the first summand is subtracted": partial(_signed, -1, 1),
        **_NO_GRADIENT,
    },
    "sub": {
        "the difference is turned round": lambda found, args: -found,
        "what is subtracted is left out": _first,
        "what is subtracted stands alone": partial(_signed, 0, -1),
        "what is subtracted is added": partial(_signed, 1, 1),
        "what is subtracted is doubled": partial(_signed, 1, -2),
        "what is subtracted is halved": partial(_signed, 1, -0.5),
        "both have the minus": partial(_signed, -1, -1),
        **_NO_GRADIENT,
    },
    "tanh": {
        **_LEFT_OUT,
        "multiplied by its argument": lambda found, args: found * args[0],
        "left out in backward": _straight_through,
        "backward takes its slope at the result": _slope_at_result,
    },
    "pow": {**_LEFT_OUT, "its size, not its square": lambda found, args: args[0].abs()},
    "log": _LEFT_OUT,
    "logsigmoid": {
        "its argument has the other sign": lambda found, args: torch.nn.functional.logsigmoid(-args[0]),
        **_NO_GRADIENT,
    },
    "exp": {
        **_LEFT_OUT,
        **{f"its argument is bounded by -{x:g} and {x:g}": partial(_of_bounded, x) for x in _BOUNDS},
        "what overflows float32 becomes 0": partial(where_it_overflows, 0.0),
        "what overflows float32 becomes the largest number": partial(where_it_overflows, _LARGEST),
    },
    "where": {
        "the condition is ignored": _second,
        "the condition is never true": lambda found, args: _tensor(args[2], found),
        **_NO_GRADIENT,
    },
    "sum": _NO_GRADIENT,
    "logaddexp": {
        "log-probabilities are averaged, not probabilities": _mean_of_logs,
        "the weights of the two are exchanged": _weights_exchanged,
        "always the first": _first,
        "always the second": _second,
        **_NO_GRADIENT,
    },
}
"""The changes to each kind of operation, in words and as a function."""
