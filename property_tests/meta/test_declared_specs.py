# SPDX-License-Identifier: Apache-2.0
"""What a spec must not say, and what its functions must not return: each has a message."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from lossgate import Between, CoverageGoal, Option, Problem, Spec, Term, Terms, UsageError, field, option
from lossgate.adequacy.option_mutants import option_mutants
from lossgate.adequacy.set_cover import required_goals
from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.dense_candidates import dense_candidate


class SomeOptions(lossgate.Options):
    gamma: float = option(2.0, "a power", choices=(2.0, 0.0))
    mode: str = option("a", "a mode", choices=("a", "b"))


class Divisor(SomeOptions):
    heat: float = option(1.0, "divides", choices=(1.0, 2.0))


class SomeBatch(lossgate.Batch):
    weights: Tensor = field("token", "weights")


class HasHidden(lossgate.Batch):
    hidden: Tensor = field("token", "not those of the head")


class HasBias(lossgate.Options):
    bias: bool = option(False, "a bias")


class NoDefault(lossgate.Options):
    gamma: float


class NoChoices(lossgate.Options):
    gamma: float = option(2.0, "a power")


@dataclass(frozen=True)
class NoMeaning:
    gamma: float = 2.0


def nll(values: Any, batch: Any, options: Any) -> Any:
    """The sum of all NLLs."""
    return torch.where(batch.mask, -values.logprobs, 0.0).sum()


def scenario(**changes: Any) -> Option:
    return Option(**{"name": "kind", "meaning": "a kind", "default": "a", "choices": ("a", "b"), **changes})


def goal(**changes: Any) -> dict[str, CoverageGoal]:
    return {"mine": CoverageGoal(**{"meaning": "mine", "reached": nll, **changes})}


DECLARATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": nll}, "spec(...) decorates a reference without a name; write @lossgate.spec('focal') above"),
    "name": ({"name": "a loss"}, "spec('a loss'): expected a name of letters, digits, '_', '-' and '.'"),
    "uses": (
        {"uses": ("logprob",)},
        "spec('mine', uses=('logprob',)): unknown value per token 'logprob'; did you mean 'logprobs'?",
    ),
    "uses as text": ({"uses": "logprobs"}, "spec('mine', uses='logprobs'): expected a tuple; write uses=('logprobs',)"),
    "head": ({"heads": ("hiden",)}, "spec('mine', heads=('hiden',)): unknown head 'hiden'; did you mean 'hidden'?"),
    "no head": (
        {"heads": ()},
        "spec('mine', heads=()): expected at least one of hidden, logits, logprobs, values, rewards",
    ),
    "output": ({"outputs": ("los",)}, "spec('mine', outputs=('los',)): unknown output 'los'; did you mean 'loss'?"),
    "batch": ({"batch": dict}, "spec('mine', batch=dict): expected a class derived from lossgate.Batch"),
    "batch object": ({"batch": 3}, "spec('mine', batch=3): expected a class derived from lossgate.Batch"),
    "field of a head": (
        {"batch": HasHidden},
        "batch=HasHidden): field 'hidden' is also an input of head 'hidden'; give it another name, such as",
    ),
    "options": ({"options": dict}, "spec('mine', options=dict): expected a class derived from lossgate.Options"),
    "option of every spec": ({"options": HasBias}, "every spec has an option 'bias' already; give it another name"),
    "no default": ({"options": NoDefault}, "NoDefault.gamma has no default; give it one: gamma = lossgate.option("),
    "no meaning": ({"options": NoMeaning}, "NoMeaning.gamma does not say what it means; write gamma = lossgate.option"),
    "no choices": ({"options": NoChoices}, "NoChoices.gamma does not say which values problems draw; write"),
    "choices of no option": ({"choices": {"gama": (1.0,)}}, "SomeOptions has no option 'gama'; did you mean 'gamma'?"),
    "temperature": ({"temperature": "gama"}, "spec('mine', temperature='gama'): no such option; did you mean 'gamma'?"),
    "temperature of 0": (
        {"temperature": "gamma"},
        "spec('mine', temperature='gamma'): the option has the value 0.0; expected numbers above 0",
    ),
    "softcap": (
        {"softcap": "mode"},
        "spec('mine', softcap='mode'): the option has the value 'a'; expected numbers above 0, or None",
    ),
    "group": (
        {"option_groups": (("gamma", "mod"),)},
        "spec('mine', option_groups=(('gamma', 'mod'),)): unknown option 'mod'; did you mean 'mode'?",
    ),
    "ids": ({"gathered_ids": "weight"}, "spec('mine', gathered_ids='weight'): no such field; did you mean 'weights'?"),
    "metrics": (
        {"metrics": ("a",)},
        "spec('mine', metrics=('a',)): expected a mapping, such as {'accuracy': 'what it means'}",
    ),
    "metric": ({"metrics": {"a": 3}}, "spec('mine', metrics['a']=3): expected what it means, or a lossgate.Metric"),
    "metric loss": (
        {"metrics": {"loss": "x"}},
        "spec('mine', metrics['loss']='x'): 'loss' is the name of another output; give the metric another name",
    ),
    "metric logprobs": (
        {"metrics": {"logprobs": "x"}},
        "metrics['logprobs']='x'): 'logprobs' is the name of another output; give the metric another name",
    ),
    "metric grad": (
        {"metrics": {"grad of hidden": "x"}},
        "metrics['grad of hidden']='x'): 'grad of hidden' is the name of another output; give the metric another name",
    ),
    "reduction": (
        {"metrics": {"a": lossgate.Metric(meaning="x", reduction="mean")}},  # pyright: ignore[reportArgumentType]
        "its reduction is 'mean'; expected one of sum, min, max. A mean is a sum that is already divided",
    ),
    "scenarios": (
        {"scenarios": ("a",)},
        "spec('mine', scenarios=('a',)): expected a tuple of lossgate.Option(name=..., ...)",
    ),
    "scenario named twice": (
        {"scenarios": (scenario(name="mode"),)},
        "scenario 'mode': Option(name='mode'): an option or another scenario has this name; rename one",
    ),
    "scenario": (
        {"scenarios": (scenario(default="c"),)},
        "spec('mine'): scenario 'kind': Option(default='c'): expected one of a, b",
    ),
    "tie": (
        {"scenarios": (scenario(),), "tie_scenarios": {"kind": "c"}},
        "spec('mine', tie_scenarios['kind']='c'): expected one of a, b",
    ),
    "goals": (
        {"goals": {"mine": "x"}},
        "spec('mine', goals['mine']='x'): expected lossgate.CoverageGoal(meaning=..., reached=...)",
    ),
    "goal out of reach": (
        {"goals": goal(reached=None)},
        "u...ks=2, dtypes=(), reached=None)): it does not say how it is reached; give it reached=",
    ),
    "goal of every loss": (
        {"goals": {"masked token": goal()["mine"]}},
        "every loss has a goal of this name already; give it another name",
    ),
    "goal's option": (
        {"goals": goal(unreachable_if={"gama": (1.0,)})},
        "CoverageGoal(unreachable_if={'gama': (1.0,)}): unknown option or scenario 'gama'; did you mean 'gamma'?",
    ),
    "goal's head": (
        {"goals": goal(heads=("hiden",))},
        "goal 'mine': CoverageGoal(heads=('hiden',)): unknown head 'hiden'; did you mean 'hidden'?",
    ),
    "goal's axis": (
        {"goals": goal(axes=("pp",))},
        "goal 'mine': CoverageGoal(axes=('pp',)): unknown mesh axis 'pp'; expected one of dp, cp, tp",
    ),
    "goal's dtype": (
        {"goals": goal(dtypes=("bf16",))},
        "goal 'mine': CoverageGoal(dtypes=('bf16',)): unknown dtype 'bf16'; did you mean 'bfloat16'?",
    ),
    "goal's function": (
        {"goals": goal(reached=lambda batch: True)},
        "goal 'mine': CoverageGoal(reached=<lambda>): lossgate can't call it (too many positional",
    ),
    "trained dim": (
        {"trained_dim": "tokens"},
        "spec('mine', trained_dim='tokens'): did you mean 'token'? (expected one of token, sequence)",
    ),
    "group size": (
        {"group_size": 0},
        "spec('mine', group_size=0): expected a whole number from 1 to 64, such as 2 for pairs",
    ),
    "large group": (
        {"group_size": 2000},
        "spec('mine', group_size=2000): expected a whole number from 1 to 64, such as 2 for pairs",
    ),
    "choices as text": (
        {"choices": {"gamma": "abc"}},
        "options=SomeOptions): SomeOptions.gamma(choices='abc'): expected a tuple of values, such as (2.0,)",
    ),
    "choices without default": (
        {"choices": {"gamma": (0.0, 1.0)}},
        "options=SomeOptions): SomeOptions.gamma(choices=(0.0, 1.0)): the default 2.0 is not among them; add it",
    ),
    "choices with NaN": ({"choices": {"gamma": (2.0, float("nan"))}}, "nan can't be written into a problem"),
    "choices that are equal": ({"choices": {"gamma": (2.0, 0.0, -0.0)}}, "0.0 and -0.0 are equal; write both alike"),
    "interval without default": (
        {"choices": {"gamma": Between(3.0, 4.0)}},
        "options=SomeOptions): SomeOptions.gamma(choices=(3.0, 4.0)): the default 2.0 is not between them",
    ),
    "choices of nothing": (
        {"choices": {"gamma": 3.5}},
        "options=SomeOptions): SomeOptions.gamma(choices=3.5): expected a tuple of values, such as (2.0,)",
    ),
    "groups": ({"option_groups": ("gamma", "mode")}, "expected a tuple of tuples of options"),
    "groups of nothing": (
        {"option_groups": None},
        "option_groups=None): expected a tuple of tuples of options, such as (('top_k', 'top_p'),)",
    ),
    "two groups": (
        {"option_groups": (("gamma", "mode"), ("mode",))},
        "option_groups=(('gamma', 'mode'), ('mode',))): 'mode' is listed twice; join its groups",
    ),
    "float ids": (
        {"gathered_ids": "weights"},
        "gathered_ids='weights'): it is float32 [token]; expected ids, such as weights: Tensor =",
    ),
    "ids of nothing": (
        {"gathered_ids": []},
        "gathered_ids=[]): no such field; expected one of labels, mask, input_ids, sequence, cu_seqlens,",
    ),
    "output not used": (
        {"uses": ("entropy",), "outputs": ("loss", "logprobs")},
        "outputs=('loss', 'logprobs')): 'logprobs' needs 'logprobs' in uses=, and no gathered_ids=",
    ),
    "entropy not used": (
        {"outputs": ("loss", "token_entropy")},
        "spec('mine', outputs=('loss', 'token_entropy')): 'token_entropy' needs 'entropy' in uses=",
    ),
    "output of another head": (
        {"heads": ("rewards",), "outputs": ("loss", "logprobs")},
        "outputs=('loss', 'logprobs')): head 'rewards' does not give 'logprobs'; drop one of them",
    ),
    "no loss": (
        {"outputs": ("logprobs",), "kinks": True},
        "outputs=('logprobs',)): without 'loss' nothing calls the reference; drop metrics=, extra_metrics=,",
    ),
    "both of the logits": (
        {"options": Divisor, "temperature": "heat", "softcap": "heat"},
        "spec('mine', softcap='heat'): it is the temperature, too; give each an option",
    ),
    "kinks": ({"kinks": "no"}, "spec('mine', kinks='no'): expected True or False"),
    "also written, without a loss": (
        {"outputs": ("logprobs",), "also_written": (nll,)},
        "stop_gradient= and also_written=, or add 'loss'",
    ),
    "also written": ({"also_written": nll}, "spec('mine', also_written=nll): expected a tuple of functions"),
    "also written with one argument": (
        {"also_written": (lambda values: values,)},
        "also_written[0]=<lambda>): lossgate can't call it (too many positional arguments);",
    ),
    "stop_gradient": ({"stop_gradient": 1}, "spec('mine', stop_gradient=1): expected True or False"),
    "summary": ({"summary": ""}, "spec('mine', summary=''): expected words"),
    "source": ({"source": 3}, "spec('mine', source=3): expected words"),
    "metric's meaning": (
        {"metrics": {"a": lossgate.Metric(meaning="")}},
        "metrics['a']=Metric(meaning='', reduction='sum')): expected words as the name of a metric, and as",
    ),
    "metric's name": (
        {"metrics": {1: "x"}},
        "spec('mine', metrics[1]='x'): expected words as the name of a metric, and as what it means",
    ),
    "goals of nothing": (
        {"goals": 3},
        "goals=3): expected a mapping, such as {'clipped': lossgate.CoverageGoal(meaning=..., reached=...)}",
    ),
    "goal's name": ({"goals": {None: goal()["mine"]}}, "the name of a goal is None; expected words"),
    "goal's meaning": (
        {"goals": goal(meaning=3)},
        "spec('mine'): goal 'mine': CoverageGoal(meaning=3): expected words",
    ),
    "goal's heads": (
        {"goals": goal(heads="hidden")},
        "goal 'mine': CoverageGoal(heads='hidden'): expected a tuple; write heads=('hidden',)",
    ),
    "choices on request": (
        {"scenarios": (lossgate.Option(name="kind", meaning="m", default="a", choices=("a",), on_request=("b", 2)),)},
        "spec('mine'): scenario 'kind': Option(on_request=('b', 2)): expected a tuple of strings",
    ),
    "goal's options": (
        {"goals": goal(unreachable_if=1)},
        "goal 'mine': CoverageGoal(unreachable_if=1): expected a mapping, such as {'beta': (0.0,)}",
    ),
    "goal's values": (
        {"goals": goal(unreachable_if={"gamma": 1.0})},
        "spec('mine'): goal 'mine': CoverageGoal(unreachable_if['gamma']=1.0): expected a tuple of values",
    ),
    "goal of a scenario": (
        {"scenarios": (scenario(),), "goals": {"kind: a": goal()["mine"]}},
        "a scenario's choice has a goal of this name already; give it another name",
    ),
    "scenario of every spec": (
        {"scenarios": (scenario(name="bias"),)},
        "scenario 'bias': Option(name='bias'): an option or another scenario has this name; rename one",
    ),
    "scenario's choices": (
        {"scenarios": (scenario(choices=1),)},
        "spec('mine'): scenario 'kind': Option(choices=1): expected a tuple of strings",
    ),
    "ties of nothing": (
        {"tie_scenarios": 1},
        "spec('mine', tie_scenarios=1): expected a mapping, such as {'reference': 'equal'}",
    ),
    "draw": ({"draw": 3}, "spec('mine', draw=3): expected a function of context"),
    "draw of nothing": (
        {"draw": lambda: {"a": 1}},
        "draw=<lambda>): lossgate can't call it (too many positional arguments); expected a",
    ),
    "trained": ({"trained": "mask"}, "spec('mine', trained='mask'): expected a function of batch"),
}


@pytest.mark.parametrize(("given", "message"), DECLARATIONS.values(), ids=DECLARATIONS)
def test_a_declaration_that_is_wrong_is_refused(given: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"name": "mine", "options": SomeOptions, "batch": SomeBatch}
    assert isinstance(lossgate.spec(**right)(nll), Spec)
    with pytest.raises(UsageError) as error:
        lossgate.spec(**{**right, **given})
    assert message in str(error.value)
    assert str(error.value).startswith("spec(")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (3, "spec('mine') decorates 3; expected a function of values, batch, options"),
        (int, "spec('mine') decorates int; expected a function of values, batch, options"),
        (
            lambda values, batch: 0,
            "spec('mine')(reference=<lambda>): lossgate can't call it (too many positional arguments);",
        ),
        (lossgate.spec("mine")(nll), "spec('mine') decorates Spec('mine'), which is a spec already; decorate its"),
    ],
)
def test_what_is_no_reference_is_refused(reference: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        lossgate.spec("mine")(reference)
    assert message in str(error.value)


CLASSES: dict[str, tuple[Callable[[], Any], str]] = {
    "dims": (
        lambda: field(("token",), "x"),
        "field(dims=('token',)): expected names of dims in one string, such as 'token' or 'token topk'",
    ),  # pyright: ignore[reportArgumentType]
    "meaning": (lambda: field("token", ""), "field('token', meaning=''): expected words"),
    "dtype": (lambda: field("token", "x", dtype="f32"), "field('token', dtype='f32'): did you mean 'float32'?"),
    "draw": (lambda: field("token", "x", draw=3), "field('token', draw=3): expected a function of context"),
    "count": (lambda: field("", "x", count="all"), "field('', count='all'): expected a function of batch"),
    "dims with a comma": (lambda: field("token, k", "x"), "'token,' is no name of a dim; separate names by spaces"),
    "a dim twice": (lambda: field("token token", "x"), "a dim is named twice"),
    "token later": (lambda: field("k token", "x"), "the dim 'token' must be the first"),
    "count of tokens": (lambda: field("token", "x", count=len), "a count of the whole batch is a scalar; write field"),
    "dtype of heads": (
        lambda: field("token", "x", dtype="input"),
        "field('token', dtype='input'): did you mean 'int64'?",
    ),
    "dtype list": (
        lambda: field("token", "x", dtype=[]),
        "field('token', dtype=[]): expected one of float32, bool, int64",
    ),  # pyright: ignore[reportArgumentType]
    "unused": (lambda: field("token", "x", unused=1), "unused=1): expected True or False"),  # pyright: ignore[reportArgumentType]
    "unshifted": (lambda: field("token", "x", unshifted="yes"), "unshifted='yes'): expected True or False"),  # pyright: ignore[reportArgumentType]
    "draw of two": (
        lambda: field("token", "x", draw=lambda c, d: c),
        "field('token', draw=<lambda>): lossgate can't call it (missing a required argument: 'd');",
    ),
    "equal choices": (lambda: option(1, "x", choices=(1, True)), "1 and True are equal; write both alike"),
    "no annotation": (
        lambda: type("Mine", (lossgate.Options,), {"gamma": option(1.0, "x", choices=(1.0,))}),
        "class Mine: 'gamma' is a field but has no type annotation; write one",
    ),
    "own of": (lambda: type("Mine", (lossgate.Batch,), {"of": 3}), "Mine.of: every batch has 'of' already"),
    "filter": (
        lambda: type(
            "Mine",
            (lossgate.Batch,),
            {"__annotations__": {"logit_filter": Tensor}, "logit_filter": field("token", "x")},
        ),
        "Mine.logit_filter: every batch has 'logit_filter' already",
    ),
    "both": (
        lambda: field("", "x", draw=len, count=len),
        "field('', count=<built-in function len>): give draw= or count=, not both",
    ),
    "option meaning": (lambda: option(1.0, " "), "option(1.0, meaning=' '): expected words"),
    "choices and between": (
        lambda: option(1.0, "x", choices=(1.0,), between=(0.0, 1.0)),
        "option(1.0, between=(0.0, 1.0)): give choices= or between=, not both",
    ),
    "choices": (
        lambda: option(1.0, "x", choices=[1.0]),
        "option(1.0, choices=[1.0]): expected a tuple of values, such as (1.0,)",
    ),  # pyright: ignore[reportArgumentType]
    "default": (
        lambda: option(3.0, "x", choices=(1.0, 2.0)),
        "option(3.0, choices=(1.0, 2.0)): the default 3.0 is not among them; add it",
    ),
    "alike": (lambda: option(2, "x", choices=(2.0,)), "2 and 2.0 are equal; write both alike"),
    "value": (
        lambda: option((1, 2), "x", choices=((1, 2),)),
        "(1, 2) can't be written into a problem; expected numbers, strings or None",
    ),
    "infinite": (lambda: option(float("inf"), "x", choices=(float("inf"),)), "inf can't be written into a problem"),
    "interval": (lambda: option(1.0, "x", between=(2.0, 0.5)), "expected two numbers, the smaller first, such as"),
    "outside": (
        lambda: option(1.0, "x", between=(2.0, 3.0)),
        "option(1.0, between=(2.0, 3.0)): the default 1.0 is not between them",
    ),
    "no field": (
        lambda: type("Mine", (lossgate.Batch,), {"__annotations__": {"weights": Tensor}}),
        "Mine.weights does not say what it holds; write weights: Tensor = lossgate.field('token', 'what it is', ...)",
    ),
    "labels": (
        lambda: type("Mine", (lossgate.Batch,), {"__annotations__": {"labels": Tensor}, "labels": field("", "x")}),
        "Mine.labels: every batch has 'labels' already; give it another name",
    ),
    "sequences": (
        lambda: type("Mine", (lossgate.Batch,), {"__annotations__": {"sequences": int}, "sequences": field("", "x")}),
        "Mine.sequences: every batch has 'sequences' already; give it another name",
    ),
    "drawn tokens": (
        lambda: type(
            "Mine",
            (lossgate.Batch,),
            {
                "__annotations__": {"valid_tokens": Tensor},
                "valid_tokens": field("", "x", dtype="int64", draw=lambda c: c.integers(3)),
            },
        ),
        "Mine.valid_tokens: every batch has 'valid_tokens' already; only its count= may differ",
    ),
}


@pytest.mark.parametrize(("make", "message"), CLASSES.values(), ids=CLASSES)
def test_a_field_or_option_that_is_wrong_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)


def test_an_option_may_say_its_values_in_the_spec() -> None:
    made = lossgate.spec("mine", options=SomeOptions, choices={"gamma": Between(0.5, 3.0)})(nll)
    assert made.supported_options["gamma"].interval == (0.5, 3.0)


# What a spec's functions return


def bound(reference: Any = nll, *, returned: Any = (), **declared: Any) -> BoundProblem:
    return BoundProblem(lossgate.spec("mine", heads=("logprobs",), **declared)(reference), PROBLEM)


def batch_of(dims: str, dtype: str = "float32", **given: Any) -> type[lossgate.Batch]:
    namespace = {"__annotations__": {"mine": Tensor}, "mine": field(dims, "x", dtype=dtype, **given)}
    return type("Mine", (lossgate.Batch,), namespace)


PROBLEM = Problem(
    spec="mine", head="logprobs", dtype="float32", lengths=(3, 2), masks=("all",) * 2, hidden=1, vocab=5, seed=1
)

RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "number": (
        {"reference": lambda v, b, o: 3.0},
        "its reference returned float; expected the loss as a tensor, (loss",
    ),
    "loss": (
        {"reference": lambda v, b, o: v.logprobs},
        "its reference returned loss as a tensor of shape [5]; expected a scalar tensor: add up entries",
    ),
    "float32": (
        {"reference": lambda v, b, o: nll(v, b, o).float()},
        "its reference returned loss in float32, but computes in float64; in torch a count divided by a count is",
    ),
    "a metric in float32": (
        {"reference": lambda v, b, o: (nll(v, b, o), {"a": b.mask.sum() / 3}), "metrics": {"a": "x"}},
        "its reference returned metric 'a' in float32, but computes in float64",
    ),
    "a metric that is no tensor": (
        {"reference": lambda v, b, o: (nll(v, b, o), {"a": 3.0}), "metrics": {"a": "x"}},
        "its reference returned metric 'a' as the float; expected a scalar tensor",
    ),
    "a metric without a name": (
        {"reference": lambda v, b, o: (nll(v, b, o), {"b": v.logprobs.sum()}), "metrics": {"a": "x"}},
        "its reference returned metric 'b', which metrics= lacks; expected one of a",
    ),
    "detached": (
        {"reference": lambda v, b, o: v.logprobs.detach().sum()},
        "its reference returned a loss without a gradient to the values per token; compute it from values",
    ),
    "raises": (
        {"reference": lambda v, b, o: v.entropy.sum()},
        "its reference raised AttributeError: values.entropy is not there: either the spec does not name 'entropy' in",
    ),
    "no terms": ({"reference": lambda v, b, o: Terms(terms={})}, "Terms(terms={}): expected at least one term"),
    "normaliser": (
        {"reference": lambda v, b, o: Terms(terms={"t": Term(values=v.logprobs, over="n")}, normalisers={"m": 1})},  # pyright: ignore[reportArgumentType]
        "term 't' has over='n', which normalisers= does not name; it names 'm'",
    ),
    "no term": (
        {"reference": lambda v, b, o: Terms(terms={"t": v.logprobs})},
        "term 't' is a tensor of shape [5]; expected lossgate.Term(values=..., over='a normaliser')",
    ),
    "terms": ({"reference": lambda v, b, o: Terms(terms=3)}, "Terms(terms=3): expected a dict"),  # pyright: ignore[reportArgumentType]
    "values of a term": (
        {"reference": lambda v, b, o: Terms(terms={"t": Term(values=3)})},  # pyright: ignore[reportArgumentType]
        "term 't' has values=3; expected a tensor",
    ),
    "normalisers": (
        {
            "reference": lambda v, b, o: Terms(
                terms={"t": Term(values=v.logprobs, over="n")}, normalisers={"n": v.logprobs}
            )
        },
        "normaliser 'n' is a tensor of shape [5]; expected a scalar tensor",
    ),
    "unused normaliser": (
        {"reference": lambda v, b, o: Terms(terms={"t": Term(values=v.logprobs)}, normalisers={"n": b.valid_tokens})},
        "normaliser 'n' divides no term; write Term(..., over='n'), or drop it",
    ),
    "metrics of terms": (
        {"reference": lambda v, b, o: Terms(terms={"t": Term(values=v.logprobs)}, metrics=3)},  # pyright: ignore[reportArgumentType]
        "Terms(metrics=3): expected a dict",
    ),
    "metrics as a list": (
        {"reference": lambda v, b, o: (nll(v, b, o), [1])},
        "its reference returned metrics as list; expected a dict of scalars by name",
    ),
    "extra metrics": (
        {"extra_metrics": lambda v, b, o: [("a", nll(v, b, o))], "metrics": {"a": "x"}},
        "its extra_metrics= returned metrics as list; expected a dict",
    ),
    "exits": ({"reference": lambda v, b, o: sys.exit(0)}, "its reference raised SystemExit: 0"),
    "count of a shape": (
        {"batch": batch_of("", "int64", count=lambda b: b.mask.long())},
        "field 'mine': its count= gave the shape (5,); expected a scalar",
    ),
    "trained": (
        {"trained": lambda b: b.mask.long()},
        "its trained= gave torch.int64 [5]; expected bools, one for each token",
    ),
    "trained raises": ({"trained": lambda b: b.weights}, "its trained= raised AttributeError: "),
    "draw raises": (
        {"batch": batch_of("token", draw=lambda c: 1 / 0)},
        "the draw= of field 'mine' raised ZeroDivisionError: division by zero (test_declared_specs.py, line ",
    ),
    "count raises": ({"batch": batch_of("", count=lambda b: 1 / 0)}, "the count= of field 'mine' raised ZeroDivisionE"),
    "shape": (
        {"batch": batch_of("sequence", draw=lambda c: c.logprobs)},
        "field 'mine': its draw= gave the shape (5,); expected that of its dims [sequence], here (2,)",
    ),
    "drawn dtype": (
        {"batch": batch_of("token", "int64", draw=lambda c: c.uniform())},
        "field 'mine': its draw= gave torch.float64; it is declared int64",
    ),
    "no tensor": ({"batch": batch_of("token", draw=lambda c: 1.0)}, "its draw= gave float; expected a tensor"),
    "no draw": (
        {"batch": batch_of("token", "int64")},
        "field 'mine' is declared int64 and has no draw=; give it one, such as draw=lambda c: c.integers(8), or",
    ),
    "dim": ({"batch": batch_of("token topk")}, "field 'mine' has dim 'topk', whose size no problem knows; did you"),
    "another field": (
        {"batch": batch_of("token"), "draw": lambda c: {"mime": c.logprobs}},
        "draw= gave 'mime', which is no field; did you mean 'mine'?",
    ),
    "draw of the spec": (
        {"batch": batch_of("token"), "draw": lambda c: {}[1]},
        "spec 'mine': its draw= raised KeyError: 1",
    ),
    "reached": (
        {"goals": goal(reached=lambda v, b, o: b.weights)},
        "spec 'mine': reached= of goal 'mine' raised AttributeError",
    ),
    "covered": ({"covered": lambda b, o: 1 / 0}, "spec 'mine': its covered= raised ZeroDivisionError"),
    "covers no goal": (
        {"covered": lambda b, o: {"mime"}, "goals": goal(reached=None)},
        "spec 'mine': its covered= gave 'mime', which is no goal; did you mean 'mine'?",
    ),
}


@pytest.mark.parametrize(("given", "message"), RESULTS.values(), ids=RESULTS)
def test_what_a_spec_must_not_return_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        _run(bound(**given))
    assert message in str(error.value)


def _run(problem: BoundProblem) -> Any:
    _ = problem.coverage
    return problem.dense.outputs(problem.bound_spec)


def test_a_metric_that_a_candidate_returns_must_come_from_the_reference() -> None:
    problem = bound(metrics={"a": "x"})
    _run(problem)
    with pytest.raises(UsageError, match="did not return metric 'a', which the candidate returns; return it, too"):
        problem.reference([problem.spec.output("loss"), problem.spec.output("a")])


def test_terms_are_added_up() -> None:
    def reference(values: Any, batch: Any, options: Any) -> Terms:
        logprobs = torch.where(batch.mask, -values.logprobs, 0.0)
        terms = {"a": Term(values=logprobs), "b": Term(values=2 * logprobs, over="n")}
        return Terms(terms=terms, normalisers={"n": batch.valid_tokens}, metrics={"n": batch.valid_tokens.to(logprobs)})

    def plain(values: Any, batch: Any, options: Any) -> Tensor:
        return nll(values, batch, options) * (1 + 2 / batch.valid_tokens)

    named = _run(bound(reference, metrics={"n": "x"}))
    for output, value in _run(bound(plain)).items():
        torch.testing.assert_close(named[output], value)
    assert any(str(output) == "n" for output in named)


class Refusing(lossgate.Options):
    gamma: float = option(1.0, "a power", choices=(1.0, 2.0))

    def __post_init__(self) -> None:
        assert self.gamma < 2


class Exiting(lossgate.Options):
    gamma: float = option(1.0, "a power", choices=(1.0, 2.0))

    def __post_init__(self) -> None:
        sys.exit(0)


def test_options_are_refused_by_value_error_alone() -> None:
    made = lossgate.spec("mine", options=Refusing)(nll)
    with pytest.raises(UsageError, match=r"Refusing, which must refuse options by ValueError, raised AssertionError"):
        made.conflict({"gamma": 2.0})
    with pytest.raises(UsageError, match=r"Exiting, which must refuse options by ValueError, raised SystemExit: 0"):
        lossgate.spec("mine", options=Exiting)(nll).bind({"gamma": 2.0})


def test_outputs_and_heads_are_what_the_loss_can_give() -> None:
    ids = batch_of("token k", "int64", draw=lambda c: c.integers(2))
    assert [*lossgate.spec("mine", batch=ids, gathered_ids="mine")(nll).inputs] == ["hidden", "logits"]
    assert lossgate.spec("mine", heads=("rewards",))(nll).outputs == ("loss",)
    assert lossgate.spec("mine")(nll).outputs == ("loss", "logprobs")


class NamedAsAFilter(lossgate.Options):
    top_k: int = option(1, "not what a filter keeps", choices=(1, 2))


def test_an_option_that_is_called_as_that_of_a_filter_is_one_of_the_loss() -> None:
    made = lossgate.spec("mine", options=NamedAsAFilter)(nll)
    assert "top_k" in dense_candidate(made, "logprobs").supports
    assert made.logit_options == ()
    assert [mutant for mutant in option_mutants(dense_candidate(made, "logprobs")) if "top_k" in mutant]


# Specs as objects


def test_a_spec_is_not_copied() -> None:
    made = lossgate.spec("mine")(nll)
    assert copy.copy(made) is made
    assert copy.deepcopy([made])[0] is made


def test_a_spec_says_what_it_is_without_its_source() -> None:
    """In a notebook or with ``exec`` there is no source to read."""
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    text = (
        "import lossgate\nclass O(lossgate.Options):\n  a: float = lossgate.option(1.0, 'a  b', choices=(1.0, 2.0))\n"
    )
    text += "@lossgate.spec('made', options=O)\ndef made(values, batch, options):\n  '''A line.\n\n  More.'''\n"
    exec(text, namespace)
    made = namespace["made"]
    assert (made.summary, [one.meaning for one in made.options]) == ("A line", ["a b"])


def test_options_and_goals_of_a_spec_are_those_of_its_candidates() -> None:
    made = lossgate.spec("mine", options=SomeOptions, goals=goal())(nll)
    dense = dense_candidate(made, "hidden")
    assert dense.supports["gamma"] is lossgate.ANY
    assert "mine" in required_goals(dense, Layout(), "float32")


def test_a_goal_may_be_asked_for_in_some_dtypes_alone() -> None:
    made = lossgate.spec("mine", goals=goal(dtypes=("float32",)))(nll)
    dense = dense_candidate(made, "hidden")
    assert "mine" in required_goals(dense, Layout(), "float32")
    assert "mine" not in required_goals(dense, Layout(), "bfloat16")
