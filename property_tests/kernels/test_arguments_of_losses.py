# SPDX-License-Identifier: Apache-2.0
"""Tests of what the losses refuse: one table of numbers, and one of masks.

Kernels and references share no code, so a test asserts that they refuse the same options.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import signature
from itertools import combinations, product
from math import inf, nan
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from fused_losses import (
    ClippedPGConfig,
    Pack,
    RhoCorrection,
    RhoWeights,
    clipped_pg_loss,
    dpo_loss,
    grpo_loss,
    linear_cross_entropy,
    linear_sft_loss,
    rho_weights,
    tiled_grpo_loss,
    unchecked_values,
    vocab_parallel_cross_entropy,
)
from lossgate.losses.clipped_pg import ClippedPgLossOptions
from lossgate.losses.dpo import DpoOptions
from lossgate.losses.grpo import GrpoLossOptions, RhoOptions
from property_tests.kernels.loss_inputs import GSPO, TRUNCATED, experience, pack, rollout
from property_tests.kernels.packs import FakeGroup

# Numbers


def dpo(**changes: Any) -> Any:
    return dpo_loss(**{**pack(), "valid_sequences": 4, **changes})


def grpo(**changes: Any) -> Any:
    return grpo_loss(**rollout(**changes))


def clipped_pg(**changes: Any) -> Any:
    return clipped_pg_loss(**{**experience(positive_example_nll_weight=0.1), **changes})


def weights(**changes: Any) -> RhoWeights:
    given = {name: x for name, x in rollout().items() if name in signature(rho_weights).parameters}
    return rho_weights(**{**given, "rho": RhoCorrection(rho_mask_sequence_level=True), **changes})


def weights_metrics(**changes: Any) -> Any:
    return weights().metrics(**{"mask": pack()["mask"], "valid_tokens": 9, **changes})


FROM_0 = "a finite number from 0"
COUNT = f"{FROM_0}, or a tensor with one such number"
OR_NO_BOUND = ", or None for no bound"
OR_0 = ", or 0 for no bound"

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "dpo_loss": (dpo, dpo_loss),
    "grpo_loss": (grpo, grpo_loss),
    "clipped_pg_loss": (clipped_pg, clipped_pg_loss),
    "rho_weights": (weights, rho_weights),
    "RhoWeights.metrics": (weights_metrics, RhoWeights.metrics),
    "RhoCorrection": (RhoCorrection, RhoCorrection),
    "ClippedPGConfig": (ClippedPGConfig, ClippedPGConfig),
}
"""What is called with one bad number, and whose arguments these are."""

NO_NUMBERS = (nan, inf, -inf, "1", True)

REFUSED: dict[str, dict[str, tuple[str, tuple[float, ...]]]] = {
    "dpo_loss": {
        "valid_sequences": (COUNT, (-3,)),
        "reference_policy_kl_penalty": (FROM_0, (-0.1,)),
        "preference_loss_weight": (FROM_0, (-1,)),
        "sft_loss_weight": (FROM_0, (-1,)),
        "epsilon": (FROM_0, (-1, -1e-8)),
    },
    "grpo_loss": {
        "valid_tokens": (COUNT, (-3,)),
        "sequences": ("an integer from 0", (-1, 2.5)),
        "clip_lower": ("a finite number from 0 up to 1", (-1, 1.5)),
        "clip_higher": (FROM_0, (-0.1,)),
        "beta": (FROM_0, (-0.05,)),
        "kl_estimator": ("0, 1, 2 or 3", (4, -1, 1.5)),
        "loss_denominator": ("a finite number above 0, or 'token'", (0.0, -1.0)),
        "loss_scale": ("an integer from 1", (0, -1, 1.5)),
    },
    "clipped_pg_loss": {
        "valid_tokens": (COUNT, (-3,)),
        "valid_sequences": (COUNT, (-3,)),
        "positive_tokens": (COUNT, (-3,)),
    },
    "rho_weights": {"sequences": ("an integer from 0", (-1, 2.5))},
    "RhoWeights.metrics": {"valid_tokens": (COUNT, (-3,))},
    "RhoCorrection": {
        "rho_clamp_lower_bound": (f"a finite number above 0 below 1{OR_0}", (-0.5, 1.0)),
        "rho_clamp_upper_bound": (f"a finite number above 1{OR_0}", (-1.0, 1.0)),
        "rho_mask_lower_bound": (f"a finite number above 0 below 1{OR_0}", (-0.5, 1.5)),
        "rho_mask_upper_bound": (f"a finite number above 1{OR_0}", (-1.0, 0.5)),
    },
    "ClippedPGConfig": {
        **dict.fromkeys(("ratio_clip_min", "ratio_clip_max"), (FROM_0, (-0.1,))),
        "ratio_clip_c": ("a finite number above 1, or None for no dual clip", (1.0, 0.9)),
        "reference_policy_kl_penalty": (FROM_0, (-0.01,)),
        **dict.fromkeys(
            ("kl_input_clamp_value", "kl_output_clamp_value", "truncated_importance_sampling_ratio"),
            (f"a finite number above 0{OR_NO_BOUND}", (0.0, -1.0)),
        ),
        "truncated_importance_sampling_ratio_min": (f"{FROM_0}{OR_NO_BOUND}", (-0.5,)),
        "positive_example_nll_weight": (FROM_0, (-1,)),
        "epsilon": (FROM_0, (-1, -1e-8)),
    },
}
"""By function and argument: what the message expects, and numbers that are refused beside those of
``NO_NUMBERS``.
"""

TABLE = [
    (name, argument, value, expected)
    for name, rows in REFUSED.items()
    for argument, (expected, values) in rows.items()
    for value in (*NO_NUMBERS, *values)
]


@pytest.mark.parametrize(("name", "argument", "value", "expected"), TABLE)
def test_bad_numbers_are_refused(name: str, argument: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        CALLS[name][0](**{argument: value})
    assert str(raised.value) == f"{argument} {value!r}: expected {expected}"


@pytest.mark.parametrize("name", REFUSED)
def test_every_number_of_every_loss_is_in_the_table(name: str) -> None:
    hints = get_type_hints(CALLS[name][1].__init__ if isinstance(CALLS[name][1], type) else CALLS[name][1])
    numbers = {argument for argument, hint in hints.items() if _may_be_a_number(hint)}
    assert numbers == REFUSED[name].keys()


def _may_be_a_number(hint: Any) -> bool:
    if get_origin(hint) is None:
        return hint in (int, float)
    return any(_may_be_a_number(arg) or type(arg) in (int, float) for arg in get_args(hint))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, rows in REFUSED.items()
        for argument, (expected, _) in rows.items()
        if "tensor" not in expected and "integer" not in expected and argument != "kl_estimator"
    ],
)
def test_settings_are_no_tensors(name: str, argument: str) -> None:
    """The value of a tensor could not be checked without waiting for its device."""
    with pytest.raises(ValueError, match=rf"^{argument} is a tensor \[\]: .*; pass {argument}.item\(\)"):
        CALLS[name][0](**{argument: torch.tensor(0.5)})


COUNTS = [
    (name, argument) for name, rows in REFUSED.items() for argument, (expected, _) in rows.items() if expected == COUNT
]


@pytest.mark.parametrize(("name", "argument"), COUNTS)
@pytest.mark.parametrize(
    ("count", "message"),
    [
        (torch.tensor(-3), "-3: expected a finite number from 0"),
        (torch.tensor(nan), "nan: expected a finite number from 0"),
        (torch.tensor([4, 5]), r"\[2\]: expected a number, or a tensor with one"),
        (torch.tensor(True), "is torch.bool: expected a number"),
        (torch.tensor(12.0).bfloat16(), "is torch.bfloat16, which rounds counts: expected integers, float32"),
    ],
    ids=["negative", "nan", "two", "bool", "bfloat16"],
)
def test_bad_counts_in_tensors_are_refused(name: str, argument: str, count: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} {message}"):
        CALLS[name][0](**{argument: count})


@pytest.mark.parametrize(("name", "argument"), COUNTS)
def test_a_count_may_be_a_tensor_with_one_number(name: str, argument: str) -> None:
    call = CALLS[name][0]
    expected = call(**{argument: 12})
    for count in (12.0, torch.tensor(12), torch.tensor([12]), torch.tensor([[12.0]])):
        assert_same(call(**{argument: count}), expected)


def test_counts_in_tensors_are_not_read_where_values_are_unchecked() -> None:
    with unchecked_values():
        dpo(valid_sequences=torch.tensor(-3))


# Counts below those of the call


LABELS = torch.arange(12) % 5


def linear_ce(mask: Tensor, labels: Tensor = LABELS, **changes: Any) -> Any:
    return linear_cross_entropy(*_hidden_and_weight(), labels, **{"mask": mask, "valid_tokens": 9, **changes})


def parallel_ce(mask: Tensor, labels: Tensor = LABELS, **changes: Any) -> Any:
    hidden, weight = _hidden_and_weight()
    return vocab_parallel_cross_entropy(hidden @ weight.T, labels, **{"mask": mask, "valid_tokens": 9, **changes})


def sft(mask: Tensor, labels: Tensor = LABELS, **changes: Any) -> Any:
    given: dict[str, Any] = {"real": torch.ones(12), "sequence": pack()["sequence"], "sequences": 4, "valid_tokens": 9}
    return linear_sft_loss(*_hidden_and_weight(), labels, **{**given, "mask": mask, **changes})


def tiled(mask: Tensor, labels: Tensor = LABELS, **changes: Any) -> Any:
    head = nn.Linear(4, 5, bias=False, dtype=torch.float64)
    given: dict[str, Any] = {"advantages": torch.ones(12), "beta": 0, "valid_tokens": 9, "tiles": 3, "mask": mask}
    return tiled_grpo_loss(head, _hidden_and_weight()[0], labels, **{**given, **changes})


def _hidden_and_weight() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (12, 5))
    return hidden, weight.requires_grad_()


COUNTED: dict[str, tuple[Callable[..., Any], str, int]] = {
    "linear_cross_entropy": (linear_ce, "valid_tokens", 9),
    "vocab_parallel_cross_entropy": (parallel_ce, "valid_tokens", 9),
    "linear_sft_loss": (sft, "valid_tokens", 9),
    "tiled_grpo_loss": (tiled, "valid_tokens", 9),
    "dpo_loss": (dpo, "valid_sequences", 4),
    "grpo_loss": (grpo, "valid_tokens", 9),
    "RhoWeights.metrics": (weights_metrics, "valid_tokens", 9),
    "clipped_pg_loss, tokens": (clipped_pg, "valid_tokens", 9),
    "clipped_pg_loss, sequences": (clipped_pg, "valid_sequences", 4),
    "clipped_pg_loss, positive tokens": (clipped_pg, "positive_tokens", 4),
}
"""What is called, with a count, and how much of it is in the call."""
of_counts = pytest.mark.parametrize("name", COUNTED)


@of_counts
@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda n: torch.tensor([float(n)])])
def test_a_count_below_that_of_the_call_is_refused(name: str, kind: Callable[[int], Any]) -> None:
    call, argument, own = COUNTED[name]
    call(mask=pack()["mask"], **{argument: kind(own)})
    for count in (own - 1, 0):
        message = rf"^{argument} {count}: expected at least {own}, the (tokens|sequences) that count in this call; pass"
        with pytest.raises(ValueError, match=message):
            call(mask=pack()["mask"], **{argument: kind(count)})
        with unchecked_values():
            call(mask=pack()["mask"], **{argument: kind(count)})


@of_counts
def test_a_part_of_a_batch_has_its_count(name: str) -> None:
    """A call may hold any part of it, also none. In float32, a mean over ranks lacks a little."""
    call, argument, own = COUNTED[name]
    for count in (own + 1, 1000 * own, torch.tensor(own / 3, dtype=torch.float32) * 3 * (1 - 1e-7)):
        call(mask=pack()["mask"], **{argument: count})
    call(mask=torch.zeros(12), **{argument: 0})


@pytest.mark.parametrize("name", ["dpo_loss", "clipped_pg_loss, sequences"])
def test_sequences_without_tokens_need_no_count(name: str) -> None:
    """A trainer may count all sequences, or those with a token that counts."""
    call, argument, _ = COUNTED[name]
    call(mask=pack()["mask"] & (pack()["sequence"] < 2), **{argument: 2})
    call(mask=pack()["mask"], sample_mask=torch.tensor([1, 1, 0, 0]), **{argument: 2})
    call(mask=pack()["mask"], sample_mask=torch.tensor([1, 0, 0, 0]), **{argument: 1})


@of_counts
def test_what_is_in_the_call_is_read_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading waits for the device."""
    call, argument, own = COUNTED[name]
    read, plain = list[Tensor](), Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: (read.append(x), plain(x))[1])
    call(mask=pack()["mask"], **{argument: own})
    assert len(read) == 1


# Labels that are none


OF_LABELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "linear_cross_entropy": (linear_ce, {}),
    "linear_cross_entropy, another index": (linear_ce, {"ignore_index": 2}),
    "vocab_parallel_cross_entropy": (parallel_ce, {}),
    "linear_sft_loss": (sft, {}),
    "tiled_grpo_loss": (tiled, {}),
    "tiled_grpo_loss, rho of sequences": (
        tiled,
        {
            "sequence": pack()["sequence"],
            "sequences": 4,
            "vllm_logprobs": pack()["logprobs"],
            "rho": RhoCorrection(rho_mask_sequence_level=True),
        },
    ),
}


@pytest.mark.parametrize("name", OF_LABELS)
def test_a_token_that_counts_has_a_label(name: str) -> None:
    call, given = OF_LABELS[name]
    none = given.get("ignore_index", -100)
    mask = pack()["mask"] & LABELS.ne(none)
    call(mask, LABELS.masked_fill(~mask, none), **given)
    labels = LABELS.masked_fill(torch.arange(12) == 3, none)
    mask[3] = True
    message = rf"^labels: token 3 has {none}, which is no label, but mask counts it; set mask to 0 there"
    with pytest.raises(ValueError, match=message):
        call(mask, labels, **given)
    with unchecked_values():
        found = call(mask, labels, **given)
    loss = found if isinstance(found, Tensor) else found[0]
    assert loss.isnan() == (none == -100)  # not a mean over fewer tokens


# The split of a pack


OF_PACKS: dict[str, Callable[..., Any]] = {
    "dpo_loss": dpo,
    "clipped_pg_loss": lambda **given: clipped_pg(positive_tokens=12, **given),
    "clipped_pg_loss, GSPO": lambda **given: clipped_pg(config=ClippedPGConfig(**GSPO), **given),
    "linear_sft_loss": lambda **given: sft(pack()["mask"], **given),
    "rho_weights": weights,
    "grpo_loss": lambda **given: grpo(rho=RhoCorrection(rho_mask_sequence_level=True), **given),
    "tiled_grpo_loss": lambda **given: tiled(
        pack()["mask"], **OF_LABELS["tiled_grpo_loss, rho of sequences"][1] | given
    ),
}


@pytest.mark.parametrize("name", OF_PACKS)
@pytest.mark.parametrize(("made_with", "given"), [(2, None), (2, 4), (1, 2)])
def test_the_loss_has_the_ranks_of_its_pack(name: str, made_with: int, given: int | None) -> None:
    """Without them it would take a rank's part of each sequence for the whole."""
    made, passed = (n and FakeGroup(n, 0) for n in (made_with, given))
    lengths = torch.tensor([0, 4, 4, 8, 12]) * made_with
    sequence = Pack.of(lengths, cp_group=made).sequence  # type: ignore[arg-type]
    message = (
        rf"^cp_group {'of . ranks' if given else 'None'}: expected one of {made_with}, since sequence is that of a"
    )
    with pytest.raises(ValueError, match=message):
        OF_PACKS[name](sequence=sequence, cp_group=passed)
    OF_PACKS[name](sequence=sequence.clone())


# Other settings


FLAGS = [
    (name, argument)
    for name, (_, function) in CALLS.items()
    for argument, parameter in signature(function).parameters.items()
    if isinstance(parameter.default, bool)
]


@pytest.mark.parametrize(("name", "argument"), FLAGS)
def test_flags_are_true_or_false(name: str, argument: str) -> None:
    """The text "false" from a file of settings would count as true."""
    with pytest.raises(ValueError, match=f"^{argument} 'false': expected False or True"):
        CALLS[name][0](**{argument: "false"})


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (dpo, {"loss_type": "hinge"}, "loss_type 'hinge': expected 'sigmoid' or 'ipo'"),
        (dpo, {"loss_type": "ipo", "reference_policy_kl_penalty": 0.0}, "reference_policy_kl_penalty 0.0: expected"),
        (grpo, {"loss_fn": "ppo"}, "loss_fn 'ppo': expected 'dapo' or 'cispo'"),
        (grpo, {"loss_denominator": "tokens"}, "loss_denominator 'tokens': expected .* or 'token'"),
        (grpo, {"rho": 2.0}, "rho 2.0: expected RhoCorrection"),
        (clipped_pg, {"config": {}}, "config {}: expected ClippedPGConfig"),
        (
            RhoCorrection,
            {"rho_mask_lower_bound": 0.9, "rho_mask_upper_bound": 0.8, "rho_mask_tv_divergence": True},
            "rho_mask_upper_bound 0.8: expected more than rho_mask_lower_bound 0.9, or 0",
        ),
    ],
)
def test_bad_settings_are_refused(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call(**changes)


# What the references refuse

NO_SETTINGS = {"reference_layout", "temperature"}
"""The kernel of DPO has no such options: its caller aligns the reference, and gives it the
log-probabilities."""
NUMBERS = (-inf, -1, 0, 0.5, 1, 1.5, 2, inf, nan)


def kernel_grpo(**settings: Any) -> None:
    rho = {name: settings.pop(name) for name in RhoOptions.__dataclass_fields__ if name in settings}
    grpo(rho=RhoCorrection(**rho), **settings)


OPTIONS: dict[str, tuple[Callable[..., Any], type, dict[str, Any]]] = {
    "dpo": (dpo, DpoOptions, {}),
    "grpo": (kernel_grpo, GrpoLossOptions, {}),
    "rho": (RhoCorrection, RhoOptions, {}),
    "rho, tv": (RhoCorrection, RhoOptions, {"rho_mask_tv_divergence": True}),
    "clipped_pg": (ClippedPGConfig, ClippedPgLossOptions, {}),
    "clipped_pg, GSPO": (ClippedPGConfig, ClippedPgLossOptions, GSPO),
    "clipped_pg, CISPO": (ClippedPGConfig, ClippedPgLossOptions, {"use_cispo": True}),
    "clipped_pg, truncated": (ClippedPGConfig, ClippedPgLossOptions, TRUNCATED),
    "clipped_pg, GSPO truncated": (ClippedPGConfig, ClippedPgLossOptions, GSPO | TRUNCATED),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_kernel_and_reference_refuse_the_same_options(name: str) -> None:
    """Tries every value of every option, and for the constructors every pair of them."""
    kernel, reference, base = OPTIONS[name]
    differ = [
        changes
        for changes in _changes(reference, pairs=isinstance(kernel, type))
        if _refuses(lambda changes=changes: kernel(**{**base, **changes}))
        != _refuses(lambda changes=changes: _unchecked(reference, {**base, **changes}).__post_init__())
    ]
    assert differ == []


def _changes(options: type, pairs: bool) -> Iterator[dict[str, Any]]:
    values = {name: _values(hint) for name, hint in get_type_hints(options).items() if name not in NO_SETTINGS}
    yield from ({name: value} for name in values for value in values[name])
    for a, b in combinations(values, 2) if pairs else ():
        yield from ({a: x, b: y} for x, y in product(values[a], values[b]))


def _values(hint: Any) -> tuple[Any, ...]:
    """Returns values of a type, and others of the types that it has."""
    if hint in (int, float):
        return NUMBERS
    if hint in (bool, NoneType):
        return {bool: (False, True), NoneType: (None,)}[hint]
    if get_origin(hint) is None:
        return (hint,)
    values = [value for arg in get_args(hint) for value in _values(arg)]
    return (*values, "unknown") if any(isinstance(value, str) for value in values) else (*values,)


def _unchecked(options: type, values: dict[str, Any]) -> Any:
    """Makes options past the type checks of the test run, which users do not have."""
    made = options()
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _refuses(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def test_options_have_one_name() -> None:
    """Each option of a reference is one of the kernel.

    The kernel alone has the option for NeMo-RL's numbers of filtered tokens, tested beside them.
    """

    def names(options: type) -> set[str]:
        return {field.name for field in fields(options)}

    assert names(ClippedPGConfig) - {"filtered_tokens"} == names(ClippedPgLossOptions)
    assert names(RhoCorrection) == names(RhoOptions)
    assert names(DpoOptions) - NO_SETTINGS <= signature(dpo_loss).parameters.keys()
    assert names(GrpoLossOptions) - names(RhoOptions) <= signature(grpo_loss).parameters.keys()


# Masks and sequences

OF_SEQUENCES = RhoCorrection(rho_mask_sequence_level=True)
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo_loss": ("dpo_loss", {}),
    "grpo_loss": ("grpo_loss", {"rho": OF_SEQUENCES}),
    "rho_weights": ("rho_weights", {"rho": OF_SEQUENCES}),
    "clipped_pg_loss": ("clipped_pg_loss", {}),
    "clipped_pg_loss, GSPO": ("clipped_pg_loss", {"config": ClippedPGConfig(**GSPO)}),
}
MASKS = [
    *((name, "mask", pack()["mask"]) for name in LOSSES),
    *((name, "sample_mask", torch.tensor([1, 1, 0, 0]).bool()) for name in ("dpo_loss", "clipped_pg_loss")),
]
with_masks = pytest.mark.parametrize(("name", "argument", "mask"), MASKS, ids=[f"{a}-{b}" for a, b, _ in MASKS])


def outcome(name: str, **changes: Any) -> Any:
    """Returns what a loss returns, and the gradient of the loss."""
    function, given = LOSSES[name]
    if function == "rho_weights":
        return weights(**given, **changes)
    leaf = pack()["logprobs"].requires_grad_()
    loss, metrics = CALLS[function][0](**{"logprobs": leaf, **given, **changes})
    return loss, metrics, torch.autograd.grad(loss, leaf)


def assert_same(found: Any, expected: Any) -> None:
    """Compares what losses return, bit by bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@with_masks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_masks_may_be_numbers(name: str, argument: str, mask: Tensor, dtype: torch.dtype) -> None:
    """NeMo-RL's token and sample masks are."""
    assert_same(outcome(name, **{argument: mask.to(dtype)}), outcome(name, **{argument: mask}))


BAD_MASKS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "none": (lambda mask: None, "None: expected"),
    "list": (lambda mask: mask.tolist(), r"\[True, .*: expected"),
    "row": (lambda mask: mask[None], r"\[1, \d+\]: expected"),
    "half": (lambda mask: mask * 0.5, "holds 0.5: expected only 0 and 1"),
    "weight": (lambda mask: mask * 2, "holds 2: expected only 0 and 1"),
    "nan": (lambda mask: torch.where(mask, nan, 0.0), "holds nan: expected only 0 and 1"),
    "elsewhere": (lambda mask: mask.to("meta"), "is on meta: expected cpu"),
}


@with_masks
@pytest.mark.parametrize("bad", BAD_MASKS)
def test_bad_masks_are_refused(name: str, argument: str, mask: Tensor, bad: str) -> None:
    spoil, message = BAD_MASKS[bad]
    with pytest.raises(ValueError, match=f"^{argument} {message}"):
        outcome(name, **{argument: spoil(mask)})


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [-1, 4, 10**9, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sequences_of_masked_tokens_have_no_effect(name: str, garbage: int, dtype: torch.dtype) -> None:
    other = pack()["sequence"].masked_fill(~pack()["mask"], garbage).to(dtype)
    assert_same(outcome(name, sequence=other), outcome(name))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (torch.full((12,), -1), "sequence: token 0 has -1, outside of the pack's sequences 0 to 3"),
        (torch.arange(12), "sequence: token 4 has 4, outside of the pack's sequences 0 to 3"),
        (torch.zeros(12), "sequence is torch.float32: expected int64, int32 or int16"),
        (torch.zeros(12).to(torch.uint8), "sequence is torch.uint8"),
        (torch.zeros(5).long(), r"sequence \[5\]: expected \[12\], one for each token"),
        ([0] * 12, r"sequence \[0, .*\]: expected \[12\]"),
    ],
    ids=["negative", "large", "float", "uint8", "short", "list"],
)
def test_bad_sequences_are_refused(name: str, sequence: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        outcome(name, sequence=sequence)


def test_tokens_of_a_pack_without_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="expected no tokens in a pack without sequences"):
        dpo(sample_mask=torch.zeros(0).bool())


# Tensors

MAY_BE_MISSING = {
    ("grpo_loss", "old_logprobs"),
    ("grpo_loss", "sequence"),
    ("grpo_loss", "unfiltered_logprobs"),
    ("clipped_pg_loss", "unfiltered_logprobs"),
}
TENSORS = [
    (name, argument)
    for name in ("dpo_loss", "grpo_loss", "clipped_pg_loss", "rho_weights")
    for argument in signature(CALLS[name][1]).parameters
    if argument.endswith(("logprobs", "advantages", "sequence"))
]


@pytest.mark.parametrize(("name", "argument"), TENSORS)
@pytest.mark.parametrize("bad", ["list", "column", "elsewhere"])
def test_bad_tensors_are_refused(name: str, argument: str, bad: str) -> None:
    """``[tokens, 1]`` would broadcast."""
    tensor = torch.zeros(12, dtype=torch.long if argument == "sequence" else torch.float64)
    spoilt = {"list": tensor.tolist(), "column": tensor[:, None], "elsewhere": tensor.to("meta")}[bad]
    message = rf"^{argument} (is on meta: expected cpu|\[.*\]: expected \[)|is on cpu: expected meta, as {argument}"
    with pytest.raises(ValueError, match=message):
        CALLS[name][0](**{argument: spoilt})


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_a_tensor_that_is_needed_is_named_if_it_is_missing(name: str, argument: str) -> None:
    if (name, argument) in MAY_BE_MISSING:
        assert torch.isfinite(CALLS[name][0](**{argument: None})[0])
    else:
        with pytest.raises(ValueError, match=f"^{argument} (None: expected|.*is missing)"):
            CALLS[name][0](**{argument: None})


CONSTANTS = [
    (name, argument)
    for name in ("dpo_loss", "grpo_loss", "clipped_pg_loss")
    for argument in signature(CALLS[name][1]).parameters
    if argument.endswith(("_logprobs", "advantages")) and argument != "unfiltered_logprobs"
]


@pytest.mark.parametrize(("name", "argument"), CONSTANTS)
def test_no_gradient_flows_to_constants(name: str, argument: str) -> None:
    """The policy itself as the old one would have a ratio of 1 and no gradient."""
    constant = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=rf"^{argument} needs a gradient: .*, or pass {argument}.detach\(\)"):
        CALLS[name][0](**{argument: constant})
    with torch.no_grad():  # as in an evaluation
        CALLS[name][0](**{argument: constant})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.zeros(3)}, r"rewards \[3\]: expected \[4\], one for each sequence"),
        ({"rewards": [1.0] * 4}, r"rewards \[1.0, .*: expected \[4\]"),
        ({"rewards": torch.zeros(4, device="meta")}, "rewards is on meta: expected cpu, as sample_mask"),
        ({"rewards": None}, "rewards: missing with positive_example_nll_weight 0.1"),
        ({"positive_tokens": None}, "positive_tokens: missing with positive_example_nll_weight 0.1"),
        ({"logprobs": torch.zeros(12).long()}, "logprobs is torch.int64: expected floats"),
    ],
)
def test_other_bad_arguments_of_the_clipped_policy_gradient(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        clipped_pg(**changes)


# Compiled losses

COMPILED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dpo_loss": (dpo_loss, {**pack(), "valid_sequences": torch.tensor(4)}),
    "grpo_loss": (grpo_loss, rollout(rho=OF_SEQUENCES, valid_tokens=torch.tensor(9))),
    "grpo_loss, weights": (grpo_loss, rollout(rho=weights())),
    "clipped_pg_loss": (clipped_pg_loss, experience(**GSPO)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_losses_compile_into_one_graph(name: str) -> None:
    """Checks of values would break it, so what is compiled does not check them."""
    loss, given = COMPILED[name]
    given = given | {"mask": given["mask"].double()}
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert_same(compiled(**given), loss(**given))
