# SPDX-License-Identifier: Apache-2.0
"""Writes a first candidate, and a pytest file for it: ``lossgate init``."""

from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path
from textwrap import wrap

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import Spec

_WIDTH = 100


def write_starter(spec: Spec, head: str | None, name: str | None, folder: Path) -> tuple[Path, Path]:
    """Writes ``NAME.py`` with a candidate that runs, and ``test_NAME.py``, into a folder.

    Args:
        spec: the loss; it must be in ``lossgate list``.
        head: where the kernel starts; by default at the first head of the spec.
        name: the name of the kernel; by default ``my_`` and the name of the spec.
        folder: the folder of the files.

    Raises:
        UsageError: if the spec has no such head, the name is no valid name in Python, or a file
            exists already. Nothing is written then.
    """
    start = head or next(iter(spec.inputs))
    if start not in spec.inputs:
        raise UsageError(f"init: --head {start}: spec {spec.name!r} has no such head; {nearest(start, spec.inputs)}")
    called = name or f"my_{spec.name}"
    if not called.isidentifier() or iskeyword(called):
        raise UsageError(f"init: --name {called}: expected a valid Python name, such as my_{spec.name}")
    kernel, test = folder / f"{called}.py", folder / f"test_{called}.py"
    for file in (kernel, test):
        if file.exists():
            raise UsageError(f"init: {file} exists already and is not overwritten; choose another --name or --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kernel.write_text(_kernel(spec, start, called))
        test.write_text(_test(called))
    except OSError as error:
        raise UsageError(f"init: can't write into {folder}: {error.strerror}; choose another --folder") from None
    return kernel, test


def _kernel(spec: Spec, head: str, name: str) -> str:
    inputs, options = spec.inputs[head].__name__, spec.options_type.__name__
    returned = ", ".join(f"{one}=..." for one in spec.outputs)
    lines = [
        f'"""A candidate for spec {spec.name}: verify it with  lossgate verify {name}.py"""',
        "",
        "from torch.distributed.device_mesh import DeviceMesh",
        "",
        "import lossgate",
        "from lossgate.dense_candidates import dense_kernel",
        f"from lossgate.inputs import {inputs}",
        f"from lossgate.options import {options}",
        "",
        "",
        "@lossgate.candidate(",
        f'    "{spec.name}",',
        f'    head="{head}",',
        '    axes=("dp",),  # the mesh axes over which it can be split, of "dp", "cp" and "tp"',
        *_supports(spec),
        ")",
        f"def {name}(inputs: {inputs}, options: {options}, mesh: DeviceMesh) -> lossgate.Outputs:",
        *_comment("This is the dense reference, which agrees. Put a call of your kernel in its place."),
        "    #",
        *_inputs(spec, head),
        "    #",
        *_comment(f"It returns lossgate.Outputs({returned}). Only the first is required."),
        *_comment(f"lossgate list {spec.name} has all inputs, options and metrics."),
        f'    return dense_kernel("{spec.name}", "{head}")(inputs, options, mesh)',
    ]
    return "\n".join(lines) + "\n"


def _supports(spec: Spec) -> Iterator[str]:
    """Yields lines that name every option, because a kernel must obey the defaults, too."""
    if spec.options:
        yield "    supports={"
        yield "        # An option that is not listed keeps its default, which the kernel must obey."
        for option in spec.options:
            yield f'        # "{option.name}": lossgate.ANY,  # default: {option.default!r}'
        yield "    },"


def _inputs(spec: Spec, head: str) -> Iterator[str]:
    """Yields comments on the inputs of the head and the loss, and on the most common others."""
    yield from _comment("Each rank gets its own part:")
    for leaf, dims in HEADS[head].leaves.items():
        yield f"    #   inputs.{leaf}  [{', '.join(dims)}]"
    for field, dims in spec.fields.items():
        yield f"    #   inputs.{field}  [{', '.join(dims)}]"
    if HEADS[head].gives == "token":
        yield "    #   inputs.labels, inputs.mask  [token]"
        yield "    #   inputs.valid_tokens: trained tokens of the whole batch, over every rank"


def _comment(text: str) -> list[str]:
    return [f"    # {line}" for line in wrap(text, _WIDTH - 6, break_long_words=False, break_on_hyphens=False)]


def _test(name: str) -> str:
    return f"""import lossgate
from {name} import {name}

test_{name} = lossgate.suite({name})
"""
