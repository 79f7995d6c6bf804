# SPDX-License-Identifier: Apache-2.0
"""Every slip of a declaration is a UsageError at the decorator, before there is a kernel."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lossgate import ANY, Contract, KnownFailure, Precision, UsageError, candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS

BOTH = {"float32": Precision(), "bfloat16": Precision()}


def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
    return inputs.hidden.sum()


def test_whole_numbers_of_an_option_that_takes_floats_are_floats() -> None:
    """Else problems would be drawn with 2 or 2.0, and have other numbers."""
    whole = candidate("nll", head="logits", supports={"temperature": (2, 1.0), "reduction": "sum"})(kernel)
    assert [repr(value) for value in whole.supports["temperature"]] == ["2.0", "1.0"]
    assert whole.supports["reduction"] == "sum"


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        # Names
        ({"spec": "nl"}, "unknown spec 'nl'; did you mean 'nll'? (expected one of clipped_pg, distill, divergence"),
        ({"spec": "nope"}, "unknown spec 'nope'; expected one of clipped_pg, distill, divergence"),
        ({"head": "hiden"}, "candidate(head='hiden'): spec 'nll' has no such head; did you mean 'hidden'?"),
        ({"head": "embeddings"}, "spec 'nll' has no such head; expected one of hidden, logits, logprobs"),
        ({"spec": "value"}, "candidate(head='hidden'): spec 'value' has no such head; expected one of values"),
        ({"tokens": "row"}, "candidate(tokens='row'): did you mean 'rows'? (expected one of shard, rows, packed)"),
        ({"tokens": ["rows"]}, "candidate(tokens=['rows']): did you mean 'rows'? (expected one of"),
        ({"axes": ("pp",)}, "candidate(axes=('pp',)): unknown mesh axis 'pp'; expected one of dp, cp, tp"),
        ({"axes": ("dp", "dp")}, "candidate(axes=('dp', 'dp')): 'dp' is named twice; name it once"),
        ({"dtypes": ("bfloat",)}, "candidate(dtypes=('bfloat',)): unknown dtype 'bfloat'; did you mean 'bfloat16'?"),
        ({"dtypes": ("int8",)}, "unknown dtype 'int8'; expected one of float32, bfloat16, float16"),
        ({"dtypes": (torch.float64,)}, "unknown dtype 'float64'; that is the dtype of the reference"),
        (
            {"head": "logprobs", "refuses": ("shapes",)},
            "candidate(refuses=('shapes',)): a kernel that starts from logprobs needs no labels or ids, so it has no",
        ),
        ({"refuses": "labels"}, "candidate(refuses='labels'): expected a tuple; write refuses=('labels',)"),
        (
            {"refuses": ("label",)},
            "candidate(refuses=('label',)): unknown kind of bad input 'label'; did you mean 'labels'?",
        ),
        ({"dtypes": ()}, "candidate(dtypes=()): expected at least one of float32, bfloat16, float16"),
        (
            {"tiles": {"vocabulary": 4}},
            "candidate(tiles={'vocabulary': 4}): unknown dim 'vocabulary'; did you mean 'vocab'",
        ),
        ({"tiles": {"batch": 4}}, "unknown dim 'batch'; expected one of token, vocab, hidden"),
        ({"differentiable": ("los",)}, "unknown output 'los'; did you mean 'loss'? (expected one of loss, logprobs)"),
        ({"differentiable": ("entropy",)}, "unknown output 'entropy'; expected one of loss, logprobs"),
        (
            {"differentiable": ("loss", "loss")},
            "candidate(differentiable=('loss', 'loss')): 'loss' is named twice; name it once",
        ),
        (
            {"differentiable": ("logprobs",)},
            "candidate(differentiable=('logprobs',)): spec 'nll' requires 'loss' among them",
        ),
        ({"differentiable": ()}, "candidate(differentiable=()): spec 'nll' requires 'loss' among them"),
        # Options
        (
            {"precision": Precision(returned={"logprob": "bfloat16"})},
            ("returned={'logprob': 'bfloat16'}): unknown output or metric 'logprob'; did you mean 'logprobs'?"),
        ),
        (
            {"supports": {"temprature": 1}},
            ("['temprature']=1): spec 'nll' has no option 'temprature'; did you mean 'temperature'? (expected"),
        ),
        (
            {"supports": {"temperature": (1.0, 9.0)}},
            "candidate(supports['temperature']=(1.0, 9.0)): spec 'nll' does not allow 9.0; expected 0.3 to 3, or",
        ),
        (
            {"supports": {"reduction": "none"}},
            "candidate(supports['reduction']='none'): spec 'nll' does not allow 'none'; expected mean | sum, or",
        ),
        (
            {"supports": {"temperature": ()}},
            ("candidate(supports['temperature']=()): it supports no value; expected ANY, a value or a tuple of"),
        ),
        ({"supports": {"temperature": True}}, "spec 'nll' does not allow True; expected 0.3 to 3"),
        ({"supports": {"temperature": (ANY,)}}, "spec 'nll' does not allow lossgate.ANY; expected 0.3 to 3"),
        ({"supports": {"epsilon": float("nan")}}, "spec 'nll' does not allow nan; expected 0.0 | 1e-08 | 1e-05 | 0.5"),
        (
            {"supports": {"bias": 1}},
            "candidate(supports['bias']=1): spec 'nll' does not allow 1; expected False | True, or lossgate.ANY",
        ),
        ({"supports": {"reduction": torch.ones(2)}}, "expected mean | sum"),
        (
            {"spec": "clipped_pg", "supports": {"ratio_clip_max": (0.2, -2.0)}},
            "-2.0 is not valid with any other options: ratio_clip_max=-2.0: expected",
        ),
        # Precision and contract
        (
            {"precision": {"float32": Precision()}},
            "no Precision for dtype 'bfloat16'; give one for each of float32, bfloat16, or one for all",
        ),
        (
            {"precision": BOTH | {"bfloat61": Precision()}},
            "dtypes=('float32', 'bfloat16') has no 'bfloat61'; did you mean 'bfloat16'?",
        ),
        (
            {"precision": BOTH | {"float16": Precision()}},
            "'bfloat16') has no 'float16'; did you mean 'bfloat16'? (expected one of float32, bfloat16)",
        ),
        (
            {"contract": Contract(metrics={"entrpy": {}})},
            "Contract(metrics={'entrpy': {}}): spec 'nll' has no metric 'entrpy'; did you mean 'entropy'?",
        ),
        (
            {"contract": Contract(grads={"wieght": {}})},
            ("Contract(grads={'wieght': {}}): head 'hidden' has no gradient of 'wieght'; did you mean 'weight'?"),
        ),
        (
            {"contract": Contract(grads={"logits": {}})},
            "head 'hidden' has no gradient of 'logits'; expected one of hidden, weight, bias",
        ),
        (
            {"contract": Contract(logprobs={"cp": "replicate"})},
            "logprobs has cp='replicate', which is for whole sequences, but tokens='shard' gives a rank its own tokens",
        ),
        (
            {"contract": Contract(metrics={"loss_min": {"dp": "sum"}})},
            "has dp='sum', cp='min', tp='replicate', which mixes min and sum; name one of them for every axis",
        ),
    ],
)
def test_a_slip_is_refused_at_the_decorator(slip: dict[str, Any], message: str) -> None:
    declaration = {"spec": "nll", "head": "hidden", **slip}
    with pytest.raises(UsageError) as error:
        candidate(declaration.pop("spec"), **declaration)
    assert message in str(error.value)


def test_a_declaration_without_slips_is_kept() -> None:
    known = KnownFailure(name="x-1", example=Path("x.json"))
    declared = candidate(
        SPECS["nll"], head="hidden", known_failure=known, tiles={"vocab": 4}, supports={"temperature": (1, 2.0)}
    )(kernel)
    assert declared.known_failure is known
    assert declared.spec is SPECS["nll"]
    assert declared.supported("temperature") == (1, 2.0)
    assert declared.supported("reduction") == ("mean",)
    assert declared.tiles == {"vocab": (4,)}
    assert declared.differentiable == ("loss",)
    assert declared.tokens == "shard"
    assert declared.precision == BOTH
    assert declared.name == "kernel"


@pytest.mark.parametrize(
    ("head", "dtype", "given", "coarsest"),
    [
        ("hidden", "float32", {}, "float32"),
        ("hidden", "float32", {"products": "tf32"}, "tf32"),
        ("hidden", "float32", {"products": "bfloat16"}, "bfloat16"),
        ("logits", "float32", {"products": "tf32"}, "float32"),
        ("logits", "float32", {"logprobs": "bfloat16"}, "bfloat16"),
        ("logprobs", "float32", {"logits": "bfloat16"}, "float32"),
        ("logprobs", "float32", {"loss": "bfloat16"}, "bfloat16"),
        ("hidden", "bfloat16", {"loss": "float16"}, "bfloat16"),
        ("hidden", "float16", {"products": "tf32"}, "float16"),
        ("hidden", "float32", {"products": "tf32", "loss": "float16"}, "float16"),
        ("hidden", "float32", {"dlogits": "bfloat16", "returned": "bfloat16"}, "float32"),
    ],
)
def test_the_coarsest_format_on_the_way_to_the_loss(
    head: str, dtype: str, given: dict[str, Any], coarsest: str
) -> None:
    kernel = replace(dense_candidate(SPECS["grpo"], head), precision={dtype: Precision(**given)})
    assert kernel.coarsest(dtype) == coarsest
