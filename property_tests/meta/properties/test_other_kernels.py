# SPDX-License-Identifier: Apache-2.0
"""Right kernels of unusual make keep every property, and bugs of another make than those of the
bank are found.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from kernel_bank.property_bugs import right
from lossgate import Contract, Layout, Outputs, Precision, Problem, candidate
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.worlds.base import World

MakeWorld = Callable[[str], World]
GiveGradient = Callable[[Any, Tensor, Tensor], Any]
"""Gets the context, what was saved and the upstream gradient. It gives the gradient of the
logits."""


def mean(logprobs: Tensor, inputs: Any) -> Tensor:
    return -torch.where(inputs.mask, logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


def label_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, labels.clamp(0).long()[:, None]).squeeze(1)


class Fused(torch.autograd.Function):
    """Makes the gradient of the logits in forward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, inputs: Any, give: GiveGradient, save: Callable[[], int]) -> Tensor:
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            loss = mean(label_logprobs(own, inputs.labels), inputs)
        (gradient,) = torch.autograd.grad(loss, own)
        ctx.save_for_backward(*[gradient] * save())
        ctx.kept, ctx.give = gradient, give
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None, None, None]:  # type: ignore[override]
        saved = ctx.saved_tensors
        return ctx.give(ctx, saved[0] if saved else ctx.kept, gradient), None, None, None


def fused(
    give: GiveGradient = lambda ctx, saved, gradient: saved * gradient, save: Callable[[], int] = lambda: 1
) -> Any:
    """Returns a kernel of logits with a backward of its own."""
    return lambda inputs, options, mesh: Fused.apply(inputs.logits, inputs, give, save)


def declared(kernel: Any, head: str = "logits", **changes: Any) -> Candidate:
    return candidate("nll", head=head, dtypes=("float32",), name="kernel", **changes)(kernel)


def _in_place(ctx: Any, saved: Tensor, gradient: Tensor) -> Tensor:
    return saved.mul_(gradient)


def _frees(ctx: Any, saved: Tensor, gradient: Tensor) -> Tensor:
    if ctx.kept is None:
        raise RuntimeError("backward called twice is not supported")
    ctx.kept = None
    return saved * gradient


def _contiguous(inputs: Any, options: Any, mesh: Any) -> Tensor:
    if not inputs.logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    return mean(label_logprobs(inputs.logits, inputs.labels), inputs)


def _linear_and_fused(inputs: Any, options: Any, mesh: Any) -> Any:
    """A linear layer of torch, which refuses a second backward, and a loss that does not."""
    logits = inputs.hidden @ inputs.weight.T + (0 if inputs.bias is None else inputs.bias)
    return Fused.apply(logits, inputs, lambda ctx, saved, gradient: ctx.kept * gradient, lambda: 0)


def _chunks(inputs: Any, options: Any, mesh: Any) -> Tensor:
    """Loops over chunks, of which there must be one."""
    chunks = zip(inputs.logits.split(8), inputs.labels.split(8), strict=True)
    parts = [label_logprobs(*chunk) for chunk in chunks if len(chunk[1])]
    return mean(torch.cat(parts), inputs)


def _half(inputs: Any, options: Any, mesh: Any) -> Any:
    """The gradient of the logits is rounded to float16."""
    return Fused.apply(inputs.logits, inputs, lambda ctx, saved, g: (saved * g).half().float(), lambda: 1)


RIGHT = {
    "gradients made in forward": declared(fused()),
    "changes what is saved, so that torch refuses a second backward": declared(fused(_in_place)),
    "refuses a second backward itself": declared(fused(_frees)),
    "refuses other strides": declared(_contiguous),
    "a layer of torch before it": declared(_linear_and_fused, "hidden", supports={"bias": (False, True)}),
    "chunks, of which there must be one": declared(_chunks),
    "float16 inside": declared(_half, precision=Precision(dlogits="float16", grads_in_forward=True)),
}


def broken(kernel: Candidate, names: list[str], make_world: MakeWorld, layout: str = "single") -> dict[str, Any]:
    """Returns the findings on problems of some tokens, by the property that has them."""
    world, found = make_world(layout), dict[str, Any]()
    drawn = sample_problems(kernel, Layout.parse(layout), "float32", 60, 5)
    for problem in [p for p in drawn if 8 < p.tokens < 100 and p.vocab > 2 and "none" not in p.masks][:12]:
        case = Case(kernel, problem, world)
        for name in names:
            if name not in found and PROPERTIES[name].applies(kernel):
                result = run_case(case, PROPERTIES[name])
                if not result.agrees:
                    found[name] = result.findings
    return found


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_keeps_every_property(name: str, make_world: MakeWorld) -> None:
    assert broken(RIGHT[name], list(PROPERTIES), make_world) == {}


def test_a_kernel_may_return_the_dtype_that_autocast_chooses(make_world: MakeWorld) -> None:
    """Torch's own cross-entropy of bfloat16 logits is in float32 under autocast."""

    def of_torch(inputs: Any, options: Any, mesh: Any) -> Tensor:
        losses = torch.nn.functional.cross_entropy(inputs.logits, inputs.labels, reduction="none")
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    everywhere = Precision(logprobs="bfloat16", loss="bfloat16", dlogits="bfloat16")
    kernel = candidate("nll", head="logits", dtypes=("bfloat16",), precision=everywhere)(of_torch)
    for problem in sample_problems(kernel, Layout(), "bfloat16", 6, 0):
        result = run_case(Case(kernel, problem, make_world("single")), PROPERTIES["autocast"])
        assert (result.findings, bool(result.comparisons)) == ((), True)


@pytest.mark.slow
def test_what_a_layout_of_the_reference_needs_is_not_poisoned(make_world: MakeWorld) -> None:
    """Reference log-probabilities that belong to the token that is read are used where the mask is
    false: in DPO, at the token before.
    """
    kernel, properties = dense_candidate(SPECS["dpo"], "logprobs"), ["masked-values", "masked-nan"]
    compared, world = 0, make_world("cp=2")
    for problem in sample_problems(kernel, world.layout, "float32", 60, 1):
        if problem.options.get("reference_layout") in ("token", "rolled") and problem.tokens < 200:
            case = Case(kernel, problem, world)
            results = [run_case(case, PROPERTIES[name]) for name in properties]
            assert [result.findings for result in results] == [(), ()]
            compared += 1
    assert compared > 5


WORKSPACE: dict[str, Tensor] = {}


def _workspace(ctx: Any, saved: Tensor, gradient: Tensor) -> Tensor:
    """The gradient is a slice of a buffer that all calls share."""
    buffer = WORKSPACE.setdefault("buffer", torch.empty(1 << 16))
    return torch.mul(saved, gradient, out=buffer[: saved.numel()].view(saved.shape))


class AlsoFrozen(torch.autograd.Function):
    """Assigns the gradient of the weight, whether it is wanted or not."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, inputs: Any) -> Tensor:
        with torch.enable_grad():
            own = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = mean(label_logprobs(own[0] @ own[1].T, inputs.labels), inputs)
        ctx.gradients, ctx.weight = torch.autograd.grad(loss, own), weight
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        own = ctx.gradients[1] * gradient
        ctx.weight.grad = own if ctx.weight.grad is None else ctx.weight.grad + own
        return ctx.gradients[0] * gradient, None, None


FORWARDS = [0]


def _fewer_each_time() -> int:
    FORWARDS[0] += 1
    return 1 + FORWARDS[0] % 2


def _ratio_times_zero(inputs: Any, options: Any, mesh: Any) -> Any:
    """The ratio of tokens in a sequence that does not count is multiplied by 0."""
    kernel = dense_candidate(SPECS["clipped_pg"], "logprobs").kernel
    outputs: Any = kernel(inputs, options, mesh)
    away = inputs.mask & ~inputs.sample_mask[inputs.sequence]
    ratio = torch.exp(inputs.logprobs[away] - inputs.prev_logprobs[away])
    return replace(outputs, loss=outputs.loss + (0.0 * ratio).sum())


def _clipped(kernel: Any) -> Candidate:
    own = dense_candidate(SPECS["clipped_pg"], "logprobs")
    return replace(own, kernel=kernel, axes=(), dtypes=("float32",))


def _of_tokens(inputs: Any, options: Any, mesh: Any) -> Outputs:
    """Reads its upstream gradient entry after entry in memory, as compiled kernels may."""
    logprobs = label_logprobs(inputs.logits / options.temperature, inputs.labels)
    if logprobs.requires_grad:
        logprobs.register_hook(lambda gradient: gradient.as_strided(gradient.shape, (1,)))
    return Outputs(logprobs=logprobs)


def _of_contiguous(inputs: Any, options: Any, mesh: Any) -> Outputs:
    if not inputs.logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    return _of_tokens(inputs, options, mesh)


def _token_logprobs(kernel: Any) -> Candidate:
    declare = candidate(
        "token_logprobs", head="logits", dtypes=("float32",), differentiable=("logprobs",), name="kernel"
    )
    return declare(kernel)


WRONG = {
    "reads upstream gradients in memory order": ("strided-inputs", _token_logprobs(_of_tokens)),
    "reads upstream gradients in memory order, and refuses inputs in strides": (
        "strided-inputs",
        _token_logprobs(_of_contiguous),
    ),
    "NaN for an upstream gradient of 1": (
        "upstream-one",
        declared(fused(lambda ctx, saved, g: torch.where(g == 1, torch.nan, saved * g))),
    ),
    "no gradient for an upstream gradient of 1": (
        "upstream-one",
        declared(fused(lambda ctx, saved, g: None if float(g) == 1 else saved * g)),
    ),
    "a buffer of gradients that calls share": ("gradients-add-up", declared(fused(_workspace))),
    "a gradient for a frozen weight": (
        "frozen-inputs",
        declared(lambda inputs, options, mesh: AlsoFrozen.apply(inputs.hidden, inputs.weight, inputs), "hidden"),
    ),
    "saves less in the second forward": ("checkpointing", declared(fused(save=_fewer_each_time))),
    "a ratio times 0": ("masked-values", _clipped(_ratio_times_zero)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bug_of_another_make_is_found(name: str, make_world: MakeWorld) -> None:
    held_to, kernel = WRONG[name]
    assert held_to in broken(kernel, [held_to], make_world)


def _refuses_labels_that_count(inputs: Any, options: Any, mesh: Any) -> Any:
    trained = inputs.mask & inputs.sample_mask[inputs.sequence]
    labels = inputs.labels[trained]
    if bool(((labels < 0) | (labels >= inputs.vocab_size)).any()):
        raise ValueError("a label that the vocabulary does not have")
    clamped = replace(inputs, labels=inputs.labels.clamp(0, inputs.vocab_size - 1))
    return dense_candidate(SPECS["clipped_pg"], "logits").kernel(clamped, options, mesh)


def test_labels_are_refused_where_they_count(make_world: MakeWorld) -> None:
    """In a sequence that does not count, any label is taken."""
    own = dense_candidate(SPECS["clipped_pg"], "logits")
    kernel = replace(own, kernel=_refuses_labels_that_count, axes=(), dtypes=("float32",), refuses=("labels",))
    assert broken(kernel, ["bad-inputs"], make_world) == {}

    def takes_all(inputs: Any, options: Any, mesh: Any) -> Any:
        return own.kernel(replace(inputs, labels=inputs.labels.clamp(0, inputs.vocab_size - 1)), options, mesh)

    assert "bad-inputs" in broken(replace(kernel, kernel=takes_all), ["bad-inputs"], make_world)


def test_a_single_label_that_is_broadcast_is_no_finding(make_world: MakeWorld) -> None:
    """Of two tokens, that is what is left if the labels are one too short."""

    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        logits, labels = inputs.logits, torch.where(inputs.mask, inputs.labels, -100)
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return total / inputs.valid_tokens.clamp(min=1)

    strict, world = declared(kernel, refuses=("labels", "shapes")), make_world("single")
    problem = next(p for p in sample_problems(strict, Layout(), "float32", 20, 0) if p.tokens > 8 and p.vocab > 2)
    two = replace(problem, lengths=(2,), masks=("all",), forced_labels=(), outliers=())
    for drawn in (two, replace(two, lengths=(9,))):
        assert run_case(Case(strict, drawn, world), PROPERTIES["bad-inputs"]).findings == ()


def test_the_ratio_is_right_where_every_sequence_counts(make_world: MakeWorld) -> None:
    """So that the kernel above is found for its bug."""
    own = _clipped(dense_candidate(SPECS["clipped_pg"], "logprobs").kernel)
    assert broken(own, ["masked-values"], make_world) == {}
    assert broken(right("logits"), ["masked-values"], make_world) == {}


class SumOverTp(torch.autograd.Function):
    """Adds up over tp in forward, and leaves the gradient to each rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        return upstream[0], None


def test_parts_that_cancel_in_another_order_are_rounding(make_world: MakeWorld) -> None:
    """The caller adds up what ranks give of the gradient of the hidden states. Each has rounded its
    part to bfloat16. In the opposite order the middle row of the vocabulary is another rank's, and
    the parts of its token are a hundred times as large as their sum.
    """

    @candidate(
        "nll",
        head="hidden",
        axes=("tp",),
        dtypes=("bfloat16",),
        supports={"temperature": 2.0},
        contract=Contract(grads={"hidden": {"tp": "sum"}}),
    )
    def exact(inputs: Any, options: Any, mesh: Any) -> Tensor:
        group, rows = mesh.get_group("tp"), inputs.vocab_end - inputs.vocab_start
        logits = inputs.hidden.double() @ inputs.weight[:rows].double().T / options.temperature
        local = inputs.labels - inputs.vocab_start
        own = (local >= 0) & (local < rows)
        label = logits.gather(1, local.where(own, 0)[:, None]).squeeze(1).where(own, 0.0)
        logprobs = SumOverTp.apply(label, group) - SumOverTp.apply(logits.exp().sum(1), group).log()
        return mean(logprobs, inputs).float()

    problem = Problem(
        spec="nll",
        head="hidden",
        dtype="bfloat16",
        layout=Layout(tp=2),
        lengths=(3, 6, 7, 15),
        masks=("response", "all", "all", "holes"),
        hidden=1,
        vocab=97,
        options={"temperature": 2.0},
        label_boost=12.0,
        forced_labels=((30, 66),),
        outliers=((0, 0, -30.0), (29, 0, -30.0)),
        seed=552917540,
    )
    case = Case(exact, problem, make_world("tp=2"))
    assert run_case(case, PROPERTIES["vocabulary-order"]).findings == ()


def test_labels_of_pairs_that_do_not_count_stay(make_world: MakeWorld) -> None:
    """A pair that sample_mask drops is masked by nothing else. Its log-probabilities are judged."""

    @candidate("dpo", head="logits", dtypes=("float32",))
    def with_logprobs(inputs: Any, options: Any, mesh: Any) -> Outputs:
        logprobs = label_logprobs(inputs.logits, inputs.labels.where(inputs.mask, 0))
        apart = inputs.to_rows((logprobs - inputs.reference_logprobs).where(inputs.mask, 0.0)).sum(1)
        losses = -logsigmoid(options.reference_policy_kl_penalty * (apart[0::2] - apart[1::2]))
        pairs = inputs.valid_sequences / 2
        loss = losses.where(inputs.sample_mask[0::2], 0.0).sum() / torch.where(pairs > 0, pairs, 1.0)
        return Outputs(loss=loss, logprobs=logprobs)

    problem = Problem(
        spec="dpo",
        head="logits",
        dtype="float32",
        lengths=(2, 3, 3, 2),
        masks=("all",) * 4,
        hidden=1,
        vocab=7,
        group_size=2,
        scenario={"samples": "some"},
        seed=3,
    )
    case = Case(with_logprobs, problem, make_world("single"))
    fields = case.bound.batch.fields
    assert (fields["mask"] & ~fields["sample_mask"][fields["sequence"]]).any()
    assert run_case(case, PROPERTIES["agreement"]).findings == ()
    assert run_case(case, PROPERTIES["masked-ids"]).findings == ()
