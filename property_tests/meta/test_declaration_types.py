# SPDX-License-Identifier: Apache-2.0
"""A declaration refuses values of the wrong kind, and so do the parts that it is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lossgate import ANY, Budgets, Contract, KnownFailure, Precision, UsageError, candidate, compare, suite

BOTH = ("float32", "bfloat16")


def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
    return inputs.hidden.sum()


DECLARED = candidate("nll", head="hidden")(kernel)


def refusal(make: Callable[[], Any]) -> str:
    """Returns the message of the UsageError that a call ends in."""
    with pytest.raises(UsageError) as error:
        make()
    return str(error.value)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("spec", None, "candidate(spec=None): expected the name of a loss or a Spec; 'lossgate list' describes them"),
        ("spec", 3, "candidate(spec=3): expected the name of a loss or a Spec"),
        ("spec", ["nll"], "candidate(spec=['nll']): expected the name of a loss or a Spec"),
        ("head", None, "candidate(head=None): spec 'nll' has no such head; expected one of hidden, logits, logprobs"),
        ("head", ["hidden"], "candidate(head=['hidden']): spec 'nll' has no such head; did you mean 'hidden'?"),
        ("axes", "dp", "candidate(axes='dp'): expected a tuple; write axes=('dp',)"),
        ("axes", None, "candidate(axes=None): expected a tuple of dp, cp, tp"),
        ("axes", {"dp": 2}, "candidate(axes={'dp': 2}): expected a tuple of dp, cp, tp"),
        ("dtypes", "float32", "candidate(dtypes='float32'): expected a tuple; write dtypes=('float32',)"),
        ("dtypes", ANY, "candidate(dtypes=lossgate.ANY): expected a tuple of float32, bfloat16, float16"),
        (
            "dtypes",
            (["float32"],),
            "candidate(dtypes=(['float32'],)): unknown dtype ['float32']; did you mean 'float32'?",
        ),
        (
            "differentiable",
            "loss",
            "candidate(differentiable='loss'): expected a tuple; write differentiable=('loss',)",
        ),
        ("differentiable", 1, "candidate(differentiable=1): expected a tuple of loss, logprobs"),
        (
            "precision",
            "bfloat16",
            "candidate(precision='bfloat16'): expected lossgate.Precision(...), or a mapping with",
        ),
        ("precision", "", "candidate(precision=''): expected lossgate.Precision(...)"),
        (
            "precision",
            dict.fromkeys(BOTH, "float32"),
            "candidate(precision['float32']='float32'): expected lossgate.Precision(...)",
        ),
        ("contract", {}, "candidate(contract={}): expected lossgate.Contract(...)"),
        ("contract", "sum", "candidate(contract='sum'): expected lossgate.Contract(...)"),
        (
            "supports",
            ["temperature"],
            "candidate(supports=['temperature']): expected a mapping, such as supports={'temp",
        ),
        ("supports", [], "candidate(supports=[]): expected a mapping"),
        ("supports", ANY, "candidate(supports=lossgate.ANY): expected a mapping"),
        ("tiles", 4, "candidate(tiles=4): expected a mapping, such as tiles={'vocab': 128}"),
        (
            "tiles",
            {"vocab": True},
            "candidate(tiles['vocab']=True): expected a positive number of rows, or a tuple of them",
        ),
        ("tiles", {"vocab": 0}, "candidate(tiles['vocab']=0): expected a positive number of rows, or a tuple of them"),
        (
            "tiles",
            {"vocab": ()},
            "candidate(tiles['vocab']=()): expected a positive number of rows, or a tuple of them",
        ),
        (
            "tiles",
            {"vocab": (4, 2.0)},
            "candidate(tiles['vocab']=(4, 2.0)): expected a positive number of rows, or a tuple of them",
        ),
        ("good_for", 3, "candidate(good_for=3): expected a string"),
        ("good_for", "two\nlines", "candidate(good_for='two\\nlines'): expected a single line"),
        ("known_failure", Path("x.json"), "expected lossgate.KnownFailure(name=..., example=Path(...))"),
        ("known_failure", False, "candidate(known_failure=False): expected lossgate.KnownFailure("),
        ("name", 3, "candidate(name=3): expected a string"),
        ("axes", "dp,cp", "candidate(axes='dp,cp'): expected a tuple; write axes=('dp', 'cp')"),
        ("axes", "dp cp", "candidate(axes='dp cp'): expected a tuple; write axes=('dp', 'cp')"),
        ("axes", "", "candidate(axes=''): expected a tuple of dp, cp, tp"),
        ("axes", {"tp"}, "candidate(axes={'tp'}): a set has no order; write axes=('tp',)"),
        ("axes", set(), "candidate(axes=set()): expected a tuple of dp, cp, tp"),
        ("axes", 2, "candidate(axes=2): expected a tuple of dp, cp, tp"),
        ("axes", ("TP",), "candidate(axes=('TP',)): unknown mesh axis 'TP'; expected one of dp, cp, tp"),
        ("axes", (0,), "candidate(axes=(0,)): unknown mesh axis 0; expected one of dp, cp, tp"),
        ("axes", ["dp", "dp"], "candidate(axes=['dp', 'dp']): 'dp' is named twice; name it once"),
        ("dtypes", b"float32", "candidate(dtypes=b'float32'): expected a tuple of float32, bfloat16, float16"),
        ("dtypes", torch.float64, "candidate(dtypes=('float64',)): unknown dtype 'float64'; that is the dtype of"),
        (
            "dtypes",
            [torch.int8],
            "candidate(dtypes=['int8']): unknown dtype 'int8'; expected one of float32, bfloat16, float16",
        ),
        ("dtypes", ["float64"], "candidate(dtypes=['float64']): unknown dtype 'float64'; that is the dtype of the ref"),
        ("dtypes", ["Float32"], "candidate(dtypes=['Float32']): unknown dtype 'Float32'; did you mean 'float32'?"),
        ("dtypes", [], "candidate(dtypes=[]): expected at least one of float32, bfloat16, float16"),
        ("dtypes", torch.zeros(2), "candidate(dtypes=tensor([0., 0.])): unknown dtype tensor(0.); expected one of"),
        (
            "dtypes",
            frozenset(BOTH),
            "a set has no order; write dtypes=('bfloat16', 'float32')",
        ),
        ("refuses", {"labels"}, "candidate(refuses={'labels'}): a set has no order; write refuses=('labels',)"),
        (
            "refuses",
            ["Labels"],
            "unknown kind of bad input 'Labels'; did you mean 'labels'? (expected one of labels, s",
        ),
        ("refuses", True, "candidate(refuses=True): expected a tuple of labels, shapes"),
        ("differentiable", {"loss"}, "a set has no order; write differentiable=('loss',)"),
        ("differentiable", ["logprobs"], "candidate(differentiable=['logprobs']): spec 'nll' requires 'loss' among"),
        ("tokens", None, "candidate(tokens=None): expected one of shard, rows, packed"),
        ("tokens", "Rows", "candidate(tokens='Rows'): did you mean 'rows'?"),
        ("spec", "NLL", "unknown spec 'NLL'; expected one of clipped_pg"),
        ("head", "Hidden", "candidate(head='Hidden'): spec 'nll' has no such head; did you mean 'hidden'?"),
        (
            "tiles",
            {"vocab": {32, 64}},
            "candidate(tiles['vocab']={32, 64}): expected a positive number of rows, or a tuple of them",
        ),
        (
            "tiles",
            {"vocab": []},
            "candidate(tiles['vocab']=[]): expected a positive number of rows, or a tuple of them",
        ),
        (
            "tiles",
            {"vocab": [32, -1]},
            "candidate(tiles['vocab']=[32, -1]): expected a positive number of rows, or a tuple of them",
        ),
        (
            "tiles",
            {"vocab": "128"},
            "candidate(tiles['vocab']='128'): expected a positive number of rows, or a tuple of them",
        ),
        ("tiles", {3: 4}, "candidate(tiles={3: 4}): unknown dim 3; expected one of token, vocab, hidden"),
        (
            "supports",
            {"temperature": {1.0, 2.0}},
            "a set has no order; write supports={'temperature': (1.0, 2.0)}",
        ),
        ("supports", {"temperature": []}, "it supports no value; expected ANY, a value or a tuple of values: 0.3 to 3"),
        (
            "supports",
            {"temperature": "any"},
            "does not allow 'any'; expected 0.3 to 3, or lossgate.ANY for all of them",
        ),
        (
            "supports",
            {"temperature": Any},
            "candidate(supports['temperature']=Any): spec 'nll' does not allow Any; expected 0.3 to 3, or",
        ),
        ("supports", {"temperature": float("inf")}, "spec 'nll' does not allow inf; expected 0.3 to 3"),
        ("supports", {"temperature": float("nan")}, "spec 'nll' does not allow nan; expected 0.3 to 3"),
        ("supports", {"temperature": [1.0, None]}, "spec 'nll' does not allow None; expected 0.3 to 3"),
        ("supports", {"temperature": range(1, 3)}, "spec 'nll' does not allow range(1, 3); expected 0.3 to 3"),
        ("supports", {"reduction": "Mean"}, "spec 'nll' does not allow 'Mean'; expected mean | sum"),
        ("supports", {"bias": "yes"}, "spec 'nll' does not allow 'yes'; expected False | True"),
        (
            "supports",
            {3: 1},
            "candidate(supports[3]=1): spec 'nll' has no option 3; expected one of bias, vocab_split, reduction,",
        ),
        ("exempt", ("masked-nan",), "candidate(exempt=('masked-nan',)): expected a mapping, such as exempt={"),
        ("exempt", {"masked-nan": ""}, "candidate(exempt['masked-nan']=''): expected the reason in one line, such as"),
        ("exempt", {"masked-nan": None}, "expected the reason in one line, such as exempt={'strided-inputs': "),
        (
            "exempt",
            {3: "why"},
            "candidate(exempt[3]='why'): expected the name of a property, as in exempt={'strided-inputs': 'the",
        ),
        ("exempt", {"agreement": "why"}, "nothing is exempt from agreement; declare known_failure="),
        ("budgets", "tokens*4", "candidate(budgets='tokens*4'): expected lossgate.Budgets(...)"),
        (
            "good_for",
            "\x1b[31mred",
            "candidate(good_for='\\x1b[31mred'): expected a single line, for the verdict table",
        ),
        ("good_for", None, "candidate(good_for=None): expected a string"),
        ("name", "", "candidate(name=''): it names nothing; expected up to 100 characters that are none of : /"),
        ("name", "  ", "candidate(name='  '): it names nothing; expected up to 100 characters"),
        ("name", " a", "candidate(name=' a'): it begins or ends with a blank; expected up to"),
        ("name", "a:b", "candidate(name='a:b'): it has ':'; expected up to 100 characters that are none of : / "),
        ("name", "a/b", "candidate(name='a/b'): it has '/'; expected"),
        ("name", "a\\b", "candidate(name='a\\\\b'): it has '\\\\'; expected"),
        ("name", "[bold]x[/]", "candidate(name='[bold]x[/]'): it has '['; expected"),
        ("name", "a\nb", "candidate(name='a\\nb'): it has '\\n'; expected"),
        ("name", "a\x1b", "it has '\\x1b'; expected up to 100 characters"),
        ("name", "a*", "candidate(name='a*'): it has '*'; expected"),
        ("name", "a`id`", "candidate(name='a`id`'): it has '`'; expected"),
        ("name", "n" * 101, "it has 101 characters; expected up to 100 characters"),
        ("name", "a:b", "; write name='a_b'"),
        ("name", ("a",), "candidate(name=('a',)): expected a string, such as name='my_kernel'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_at_the_decorator(argument: str, value: Any, message: str) -> None:
    declaration = {"spec": "nll", "head": "hidden", argument: value}
    said = refusal(lambda: candidate(declaration.pop("spec"), **declaration))
    assert message in said
    assert said.isprintable()


@pytest.mark.parametrize(
    ("argument", "value", "kept"),
    [
        ("axes", ["tp", "dp"], ("tp", "dp")),
        ("axes", iter(["dp"]), ("dp",)),
        ("dtypes", ["float32"], ("float32",)),
        ("differentiable", ["loss", "logprobs"], ("loss", "logprobs")),
        ("refuses", ["labels"], ("labels",)),
        ("tiles", {"vocab": [32, 64]}, {"vocab": (32, 64)}),
        ("supports", {"temperature": [1, 2.0]}, {"temperature": (1.0, 2.0)}),
        ("supports", {"reduction": ["mean", "sum"]}, {"reduction": ("mean", "sum")}),
    ],
)
def test_a_list_is_as_good_as_a_tuple(argument: str, value: Any, kept: Any) -> None:
    assert getattr(candidate("nll", head="hidden", **{argument: value})(kernel), argument) == kept


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [Unspeakable(), torch.zeros(1000), "x" * 10_000], ids=type)
def test_a_message_is_one_line_whatever_the_value(value: Any) -> None:
    for argument in ("head", "tokens", "axes", "dtypes", "supports", "tiles", "exempt", "contract", "budgets", "name"):
        said = refusal(lambda argument=argument: candidate("nll", **{"head": "hidden", argument: value}))
        assert said.startswith(f"candidate({argument}=")
        assert said.isprintable()
        assert len(said) < 400


@pytest.mark.parametrize(
    ("decorated", "message"),
    [
        (None, "candidate(...) decorates None; expected a function of inputs, options and mesh"),
        (3, "candidate(...) decorates 3; expected a function of inputs, options and mesh"),
        (lambda inputs, options, mesh: None, "decorates a lambda, which has no name; give it one: candidate(name=..."),
        (
            candidate("nll", head="hidden")(kernel),
            "decorates a Candidate, which has no name; give it one: candidate(name=.",
        ),
    ],
)
def test_what_is_no_function_with_a_name_is_refused(decorated: Any, message: str) -> None:
    assert message in refusal(lambda: candidate("nll", head="hidden")(decorated))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Precision(logits="bfloat61"),
            "Precision(logits='bfloat61'): did you mean 'bfloat16'? (expected one of",
        ),
        (lambda: Precision(logits="fp32"), "Precision(logits='fp32'): did you mean 'float32'? (expected one of fl"),
        (lambda: Precision(logits=torch.float64), "Precision(logits='float64'): that is the dtype of the reference"),
        (
            lambda: Precision(logits="float64"),
            "Precision(logits='float64'): that is the dtype of the reference, and of",
        ),
        (lambda: Precision(logits=None), "Precision(logits=None): expected one of float32, bfloat16, float16"),
        (
            lambda: Precision(products="fp8"),
            "Precision(products='fp8'): expected one of float32, tf32, bfloat16, float16",
        ),
        (lambda: Precision(chunk=float("nan")), "Precision(chunk=nan): expected a positive number of tokens, or None"),
        (lambda: Precision(returned=3), "Precision(returned=3): expected a dtype, or a mapping such as"),
        (lambda: Precision(loss=[]), "Precision(loss=[]): expected one of float32, bfloat16, float16"),
        (lambda: Precision(chunk=0), "Precision(chunk=0): expected a positive number of tokens, or None"),
        (lambda: Precision(chunk=True), "Precision(chunk=True): expected a positive number of tokens, or None"),
        (lambda: Precision(grads_in_forward="yes"), "Precision(grads_in_forward='yes'): expected True or False"),
        (
            lambda: Contract(loss={"pp": "sum"}),
            "Contract(loss={'pp': 'sum'}): unknown mesh axis 'pp'; expected one of dp, cp, tp",
        ),
        (lambda: Contract(loss="sum"), "Contract(loss='sum'): expected placements by axis, such as {'dp': 'sum'}"),
        (lambda: Contract(loss={"dp": "min"}), "Contract(loss['dp']='min'): only metrics may be combined this way"),
        (
            lambda: Contract(grads={"weight": {"dp": "mean"}}),
            "Contract(grads['weight']['dp']='mean'): expected one of replicate, sum, avg, min, max",
        ),
        (lambda: Contract(grads={"dp": "avg"}), "Contract(grads['dp']='avg'): expected placements by axis, such as"),
        (
            lambda: Contract(metrics=["entropy"]),
            "Contract(metrics=['entropy']): expected placements by name, such as {'entropy': {'dp': 'avg'}}",
        ),
        (
            lambda: Contract(loss={"DP": "sum"}),
            "Contract(loss={'DP': 'sum'}): unknown mesh axis 'DP'; expected one of dp, cp, tp",
        ),
        (
            lambda: Contract(loss={"dp": None}),
            "Contract(loss['dp']=None): expected one of replicate, sum, avg, min, max",
        ),
        (lambda: Contract(loss={"dp": "Sum"}), "Contract(loss['dp']='Sum'): did you mean 'sum'?"),
        (lambda: Contract(logprobs=["cp"]), "Contract(logprobs=['cp']): expected placements by axis, such as"),
        (lambda: Budgets(), "Budgets(): names no budget; expected at least one of largest_tensor, peak"),
        (lambda: Budgets(peak=float("nan")), "Budgets(peak=nan): expected an expression in quotes, such as 'tokens*4'"),
        (lambda: Budgets(peak="tokens**2"), "Budgets(peak=...): 'tokens**2' has the operation tokens ** 2; expected n"),
        (lambda: Budgets(peak="chunk", where=["chunk"]), "Budgets(where=['chunk']): expected positive sizes by name"),
        (lambda: Budgets(peak="chunk", where={"chunk": True}), "Budgets(where={'chunk': True}): expected positive"),
        (lambda: Budgets(peak="tp", where={"tp": 2}), "Budgets(where={'tp': 2}): 'tp' has a meaning already; use anot"),
        (lambda: KnownFailure(name="", example=Path("x")), "KnownFailure(name=''): expected the heading in the docum"),
        (lambda: KnownFailure(name="a\nb", example=Path("x")), "the document that describes it, in one line"),
        (lambda: KnownFailure(name="x", example=None), "KnownFailure(example=None): expected a path, such as Path('f"),
        (lambda: suite(DECLARED, dtypes={"float32"}), "suite(dtypes={'float32'}): a set has no order; write dtypes=("),
        (lambda: suite(DECLARED, dtypes=3), "suite(dtypes=3): expected a tuple of dtypes"),
        (lambda: suite([DECLARED]), "expected a candidate; decorate the kernel with @lossgate.candidate(...)"),
        (lambda: compare(DECLARED, kernel), "): expected a candidate; decorate the kernel with @lossgate.candidate("),
        (lambda: compare(DECLARED, DECLARED, dtypes={"float32"}), "compare(dtypes={'float32'}): a set has no order; w"),
        (lambda: compare(DECLARED, DECLARED, dtypes=3), "compare(dtypes=3): expected a tuple of dtypes"),
        (
            lambda: KnownFailure(name="x", example="x.json"),
            "KnownFailure(example='x.json'): expected a path; write Path('x.json')",
        ),
        (
            lambda: KnownFailure(name=3, example=Path("x.json")),
            "KnownFailure(name=3): expected the heading in the document that describes it",
        ),
    ],
)
def test_parts_of_a_declaration_refuse_slips(make: Callable[[], Any], message: str) -> None:
    said = refusal(make)
    assert message in said
    assert said.isprintable()
