# SPDX-License-Identifier: Apache-2.0
"""Kernels stay on the device of their inputs and do not make the host wait for it.

So does the harness where it calls them. They run on an accelerator that is none; no GPU is needed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from fused_losses import Pack, unchecked_values
from fused_losses.packed_lengths import PackedLengths
from lossgate import Budgets, Layout
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.engine.case_result import run_case
from lossgate.observe.fake_device import DEVICE, DIED, HUNG, fake_device, raised_in_child, raised_on_fake_device
from lossgate.properties import PROPERTIES
from lossgate.worlds.base import RankContext
from property_tests.kernels.our_candidates import OURS

MISTAKES = {c.name: c for c in load_candidates(str(Path(__file__).with_name("device_mistakes.py")))}
LAYOUTS = ("single", "dp=2", "cp=2", "tp=2")
PROBLEMS = 2
"""For each layout and dtype. All are different, so that together they take most branches."""

MIXED = ("Expected all tensors to be on the same device, but found at least two devices", "Unhandled FakeTensor Device")
"""How torch begins what it raises of two devices. The second is 2.11's."""
WAITED = ("waits", "aten._local_scalar_dense.default")
SEEN = {
    "tensor_on_the_cpu": ("mixed devices", MIXED),
    "tensor_on_the_cpu_in_backward": ("mixed devices", MIXED),
    "item": WAITED,
    "item_in_backward": WAITED,
    "branch": WAITED,
    "boolean_index": ("waits", "aten.nonzero.default"),
    "no_mistake": None,
}
"""What each of ``device_mistakes.py`` raises."""

MakeWorld = Callable[[str], Any]


def cases(candidate: Candidate, layout: str, make_world: MakeWorld, dtype: str) -> list[Case]:
    seed = crc32(f"{layout} {dtype}".encode())
    drawn = sample_problems(candidate, Layout.parse(layout), dtype, PROBLEMS, seed)
    return [Case(candidate, problem, make_world(layout)) for problem in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_kernels_stay_on_their_device(name: str, make_world: MakeWorld) -> None:
    for layout in LAYOUTS:
        if set(Layout.parse(layout).axes) <= set(OURS[name].axes):
            for dtype in OURS[name].dtypes:
                for case in cases(OURS[name], layout, make_world, dtype):
                    assert raised_on_fake_device(case) is None, case.problem.describe()


@pytest.mark.parametrize("name", SEEN)
def test_mistakes_are_seen(name: str, make_world: MakeWorld) -> None:
    found = raised_on_fake_device(cases(MISTAKES[name], "single", make_world, "float32")[0])
    if found is None or SEEN[name] is None:
        assert found is SEEN[name]
        return
    kind, message = SEEN[name]
    assert (found.kind, found.message.startswith(message)) == (kind, True), found
    assert found.place.startswith("device_mistakes.py:")


@pytest.mark.parametrize(
    ("name", "budgets", "finding"),
    [
        ("tensor_on_the_cpu", None, MIXED),
        ("item", None, None),
        ("item", Budgets(host_waits="1"), None),
        ("item", Budgets(host_waits="0"), "the host waits for the device in aten._local_scalar_dense.default  [device"),
        ("no_mistake", Budgets(host_waits="0"), None),
    ],
)
def test_a_wait_is_a_fault_only_where_none_is_declared(
    name: str, budgets: Budgets | None, finding: str | tuple[str, ...] | None, make_world: MakeWorld
) -> None:
    kernel = replace(MISTAKES[name], budgets=budgets)
    result = run_case(cases(kernel, "single", make_world, "float32")[0], PROPERTIES["device"])
    assert result.fits
    assert [one.startswith(finding or "?") for one in result.findings] == [True] * (finding is not None)


def test_what_cannot_run_on_a_fake_device_says_nothing(make_world: MakeWorld) -> None:
    def needs_values(inputs: Any, options: Any, mesh: Any) -> Tensor:
        raise NotImplementedError("there is no such kernel for this device")

    kernel = replace(MISTAKES["no_mistake"], kernel=needs_values)
    result = run_case(cases(kernel, "single", make_world, "float32")[0], PROPERTIES["device"])
    assert (result.fits, result.findings) == (False, ())


def _loop() -> None:
    while True:
        pass


UNANSWERED: dict[str, tuple[Callable[[], object], str]] = {
    "dies": (lambda: os._exit(3), DIED),
    "hangs": (lambda: time.sleep(60), HUNG),
    "loops": (_loop, DIED),
}


@pytest.mark.parametrize("how", UNANSWERED)
def test_a_child_that_does_not_answer_says_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.observe.fake_device._PATIENCE", 2.0 if how == "hangs" else 1000.0)
    monkeypatch.setattr("lossgate.observe.fake_device._MOST_CPU_SECONDS", 1)
    does, message = UNANSWERED[how]
    found = raised_in_child(Layout(), lambda context: does())
    assert found is not None
    assert (found.kind, found.message) == ("other", message)


COMPILER = """
import os, sys
import torch
from lossgate.base.layout import Layout
from lossgate.observe.fake_device import fake_device, raised_in_child

def on_the_device(compute):
    def run(context):
        with fake_device():
            compute(torch.ones(4, device="sim", dtype=torch.bfloat16, requires_grad=True))
    return raised_in_child(Layout(), run), "torch._dynamo" in sys.modules

print(on_the_device(lambda x: x.float().logsumexp(0).backward()))
print(on_the_device(lambda x: x + torch.ones(4)))
def used(x):
    try:
        torch._dynamo.graph_break()
    except Exception:
        raise AssertionError("a kernel goes on without the compiler")

sys.stdout.flush()
if os.fork() == 0:  # this one does not load it for the next
    print(on_the_device(lambda x: torch.compiler.disable()(used)))
    sys.stdout.flush()
    os._exit(0)
os.wait()
print(on_the_device(used))
print(on_the_device(lambda x: (x * 2).sum().item()))
"""


@pytest.mark.slow
def test_the_compiler_is_loaded_if_something_of_it_is_used() -> None:
    """It takes longer to load than most cells take."""
    done = subprocess.run([sys.executable, "-c", COMPILER], capture_output=True, text=True, check=True)
    right, mixed, *compiled, waits = done.stdout.splitlines()
    assert right == "(None, False)"
    assert mixed.startswith("(KernelRaised(kind='mixed devices'")
    assert mixed.endswith("False)")
    assert compiled == ["(None, True)"] * 2
    assert waits.startswith("(KernelRaised(kind='waits'")


def test_threads_that_stay_in_the_parent_are_not_waited_for() -> None:
    """OpenMP's threads are not forked with the process."""
    threads, many = torch.get_num_threads(), torch.full((100_000,), 2)

    def parallel() -> None:
        torch.repeat_interleave(many, many)

    try:
        torch.set_num_threads(2)
        parallel()
        assert raised_in_child(Layout(), lambda context: parallel()) is None
    finally:
        torch.set_num_threads(threads)


def _dies(inputs: Any, options: Any, mesh: Any) -> Tensor:
    os._exit(3)


def _raises(inputs: Any, options: Any, mesh: Any) -> Tensor:
    print("there is no such kernel", file=sys.stderr)
    raise NotImplementedError("for this device")


@pytest.mark.parametrize(("kernel", "tries"), [(_dies, 1), (_raises, 3)])
def test_a_kernel_that_cannot_run_there_is_soon_left_alone(
    kernel: Any, tries: int, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fails, children, fork = replace(MISTAKES["no_mistake"], kernel=kernel, source=kernel.__name__), list[int](), os.fork
    monkeypatch.setattr("os.fork", lambda: children.append(1) or fork())
    drawn = cases(fails, "single", make_world, "float32")
    for case in (*drawn, *drawn):
        assert not run_case(case, PROPERTIES["device"]).fits
    assert len(children) == tries < 2 * len(drawn)
    assert capfd.readouterr() == ("", "")  # torch logs what it can't do, for each try


def test_a_kernel_that_ran_there_once_is_never_left_alone(make_world: MakeWorld) -> None:
    """Otherwise a finding would be gone after smaller problems on which it can't run there."""

    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        if len(inputs.labels) < least:
            raise NotImplementedError("for so few tokens")
        return inputs.logits.float().sum() * torch.zeros(1)  # made on the CPU

    mixes = replace(MISTAKES["no_mistake"], kernel=kernel, source="ran once")
    small, *_, large = sorted(cases(mixes, "single", make_world, "float32"), key=lambda case: case.problem.tokens)
    least = large.problem.tokens
    assert small.problem.tokens < least
    fits = [run_case(case, PROPERTIES["device"]).fits for case in (large, *[small] * 4, large)]
    assert fits == [True, *[False] * 4, True]


def test_a_value_of_a_tensor_on_the_cpu_is_no_wait(make_world: MakeWorld) -> None:
    """The tensor is a fake one, so that nothing can be said of what comes after."""

    def counts(inputs: Any, options: Any, mesh: Any) -> Tensor:
        return torch.arange(3).sum().item() * inputs.logits.sum()

    kernel = replace(MISTAKES["no_mistake"], kernel=counts, budgets=Budgets(host_waits="0"))
    result = run_case(cases(kernel, "single", make_world, "float32")[0], PROPERTIES["device"])
    assert (result.fits, result.findings) == (False, ())


def _backward(result: Tensor) -> None:
    result.backward(torch.ones_like(result))


def packs(context: RankContext) -> dict[str, Callable[[], Any]]:
    """Returns what no candidate calls: packs, over cp."""
    group = context.mesh.get_group("cp")
    cu_seqlens = torch.tensor([0, 3, 8], device=DEVICE)
    tokens: dict[str, Any] = dict.fromkeys(("index", "sequence", "position"), torch.zeros(6, device=DEVICE).long())
    real = torch.ones(6, dtype=torch.bool, device=DEVICE)
    starts: dict[str, Any] = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens}
    host = PackedLengths(true=(3, 5), padded=(3, 9), rows=2, row_width=None)
    pack = Pack(**tokens, real=real, lengths=cu_seqlens.diff(), **starts, cp=2, host=host)
    rows = torch.zeros(2, 5, device=DEVICE)
    whole = torch.zeros(12, device=DEVICE)
    local = torch.zeros(6, device=DEVICE, requires_grad=True)
    return {
        "Pack.of": lambda: Pack.of(cu_seqlens, cp_group=group),
        "Pack.from_rows": lambda: pack.from_rows(rows, shift=1),
        "Pack.from_rows, packed": lambda: pack.from_rows(whole, shift=1),
        "Pack.labels": lambda: pack.labels(rows.long()),
        "Pack.split": lambda: pack.split(whole),
        "Pack.gather": lambda: _backward(pack.gather(local, group)),
        "Pack.to_rows": lambda: _backward(pack.to_rows(local, 5, group)),
    }


PACKS = ("from_rows", "from_rows, packed", "labels", "split", "gather", "to_rows")


@pytest.mark.parametrize("name", ["Pack.of", *(f"Pack.{name}" for name in PACKS)])
def test_packs_stay_on_their_device(name: str) -> None:
    """``Pack.of`` must wait: the lengths of sequences decide how large its tensors are."""

    def run(context: RankContext) -> None:
        with fake_device(), unchecked_values():
            packs(context)[name]()

    found = raised_in_child(Layout(cp=2), run)
    assert (found and found.kind) == ("waits" if name == "Pack.of" else None), found
