# SPDX-License-Identifier: Apache-2.0
"""A declaration refuses values of the wrong kind, and so do the parts that it is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lossgate import ANY, Contract, KnownFailure, Precision, UsageError, candidate

BOTH = ("float32", "bfloat16")


def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
    return inputs.hidden.sum()


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
        ("tiles", {"vocab": True}, "vocab is True; expected a positive number of rows, or a tuple of them"),
        ("tiles", {"vocab": 0}, "vocab is 0; expected a positive number of rows, or a tuple of them"),
        ("tiles", {"vocab": ()}, "vocab is (); expected a positive number of rows, or a tuple of them"),
        ("tiles", {"vocab": (4, 2.0)}, "vocab is (4, 2.0); expected a positive number of rows, or a tuple of them"),
        ("good_for", 3, "candidate(good_for=3): expected a string"),
        ("good_for", "two\nlines", "candidate(good_for='two\\nlines'): expected a single line"),
        ("known_failure", Path("x.json"), "expected lossgate.KnownFailure(name=..., example=Path(...))"),
        ("known_failure", False, "candidate(known_failure=False): expected lossgate.KnownFailure("),
        ("name", 3, "candidate(name=3): expected a string"),
        ("name", "", "candidate(name=''): expected at least one character, and no ':'"),
        ("name", "a:b", "candidate(name='a:b'): expected at least one character, and no ':'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_at_the_decorator(argument: str, value: Any, message: str) -> None:
    declaration = {"spec": "nll", "head": "hidden", argument: value}
    assert message in refusal(lambda: candidate(declaration.pop("spec"), **declaration))


@pytest.mark.parametrize(
    ("decorated", "message"),
    [
        (None, "candidate(...) decorates None; expected a function of inputs, options and mesh"),
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
        (lambda: Precision(logits="fp32"), "Precision(logits='fp32'): expected one of float32, bfloat16, float16"),
        (lambda: Precision(loss=[]), "Precision(loss=[]): expected one of float32, bfloat16, float16"),
        (lambda: Precision(chunk=0), "Precision(chunk=0): expected a positive number of tokens, or None"),
        (lambda: Precision(chunk=True), "Precision(chunk=True): expected a positive number of tokens, or None"),
        (lambda: Precision(grads_in_forward="yes"), "Precision(grads_in_forward='yes'): expected True or False"),
        (lambda: Contract(loss={"pp": "sum"}), "Contract(loss): unknown mesh axis 'pp'; expected one of dp, cp, tp"),
        (lambda: Contract(loss="sum"), "Contract(loss='sum'): expected placements by axis, such as {'dp': 'sum'}"),
        (lambda: Contract(loss={"dp": "min"}), "Contract(loss): dp='min'; only metrics may be combined this way"),
        (
            lambda: Contract(grads={"weight": {"dp": "mean"}}),
            "Contract(grads['weight']): dp='mean'; expected one of replicate, sum, avg, min, max",
        ),
        (lambda: Contract(grads={"dp": "avg"}), "Contract(grads['dp']='avg'): expected placements by axis, such as"),
        (
            lambda: Contract(metrics=["entropy"]),
            "Contract(metrics=['entropy']): expected placements by name, such as {'entropy': {'dp': 'avg'}}",
        ),
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
    assert message in refusal(make)
