# SPDX-License-Identifier: Apache-2.0
"""Tests of the Triton example on the CPU, and of what gpu.md says about the interpreter.

Each runs in a process of its own: Triton decides when it is imported whether it interprets.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/triton_cross_entropy.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def python(*arguments: str, interpret: bool = True, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


DEFECTS = {
    "no_upstream": ("scale * ", ""),
    "label_in_forward": ("vocab + label, mask", "vocab + label + 1, mask"),
    "label_in_backward": ("at == label", "at == label + 1"),
    "no_rescaling": ("total * tl.exp(largest - larger)", "total"),
    "out_of_bounds": ("at < vocab, other=float", "at < vocab + 1, other=float"),
    "stride_of_upstream": ("upstream.contiguous()", "upstream"),
    "cut_off": ("vocab, dtype=torch.float32", "vocab, dtype=logits.dtype"),
}
"""What makes the example wrong: the text that is replaced, and by what. That the example itself
agrees is shown by docs/how-to/gpu.md, whose commands are tested.
"""


@pytest.mark.slow
def test_every_defect_is_found(tmp_path: Path) -> None:
    """All are judged by one command, because loading takes most of its time."""
    text = EXAMPLE.read_text()
    for name, (right, wrong) in DEFECTS.items():
        assert right in text
        kernel = text.replace("def triton_cross_entropy(", f"def {name}(").replace(right, wrong)
        (tmp_path / f"{name}.py").write_text(kernel)
    (tmp_path / "pyproject.toml").write_text("[tool.lossgate]\nshrink_calls = 0\n")
    files = [f"{name}.py" for name in DEFECTS]
    shown = python("-m", "lossgate", "verify", *files, "--dtype", "bfloat16", cwd=tmp_path).stdout
    lines = [line.split() for line in shown.partition("\nVerdicts")[0].splitlines() if "  bfloat16  " in line]
    assert {name: verdict for verdict, name, *_ in lines} == dict.fromkeys(DEFECTS, "DISAGREE")


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
import triton_cross_entropy as example
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

numbers = dict.fromkeys(("losses", "logsumexps", "upstream", "grads"), "*fp32")
types = {"labels": "*i64", "vocab": "i32", "BLOCK": "constexpr", **numbers}
for kernel in (example._forward, example._backward):
    for logits in ("*fp32", "*bf16"):
        given = {name: types.get(name, logits) for name in kernel.arg_names}
        made = compile(ASTSource(kernel, given, constexprs={"BLOCK": 1024}), target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__, logits, "ptx" in made.asm)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter takes more than the compiler does, such as annotated arguments."""
    done = python("-c", COMPILE, str(EXAMPLE.parent), interpret=False)
    expected = [f"{kernel} {logits} True" for kernel in ("_forward", "_backward") for logits in ("*fp32", "*bf16")]
    assert done.stdout.splitlines() == expected, done.stderr


LATE = """
import os, sys
import triton
os.environ["TRITON_INTERPRET"] = "1"
import lossgate
from lossgate.declaration.loading import load_candidates
(kernel,) = load_candidates(sys.argv[1])
print(lossgate.compare(kernel, kernel, layouts=["single"], dtypes=["float32"], examples=2))
"""


@pytest.mark.slow
def test_the_interpreter_must_be_chosen_before_triton_is_imported() -> None:
    """A comparison runs in the process that asks for it; ``lossgate verify`` starts others."""
    done = python("-c", LATE, str(EXAMPLE), interpret=False)
    assert "Cannot call @triton.jit'd outside of the scope of a kernel" in done.stdout


@pytest.mark.slow
def test_where_the_interpreter_differs_from_a_gpu() -> None:
    done = python(str(Path(__file__).with_name("triton_interpreter.py")))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "bfloat16 products, converted": True,
        "bfloat16 products": False,
        "stores to bfloat16 cut off": True,
        "loads out of bounds return what lies there": True,
    }
