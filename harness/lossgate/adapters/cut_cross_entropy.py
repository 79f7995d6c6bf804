# SPDX-License-Identifier: Apache-2.0
"""Cut Cross-Entropy: its Triton kernels, and what it has for where there is no Triton."""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import INTERPRETED, entry_of, ignoring, load, mean
from lossgate.declaration.supports import ANY

entry = entry_of("cut_cross_entropy")
linear_cross_entropy = load("cut_cross_entropy", "cut_cross_entropy", "linear_cross_entropy")
compiled = load("cut_cross_entropy", "cut_cross_entropy.torch_compile")


@entry("nll", "hidden", axes=(), supports=INTERPRETED | {"softcap": ANY}, tiles={"vocab": 32, "token": 32})
def triton(x, o, mesh):
    given = {"softcap": o.softcap, "reduction": "sum", "filter_eps": None}
    return mean(x, linear_cross_entropy(x.hidden, x.weight, ignoring(x), impl="cce", **given))


@entry("nll", "hidden", axes=(), supports=INTERPRETED, tiles={"vocab": 32, "token": 32}, counts="own", untrained="nan")
def triton_filtered(x, o, mesh):
    return linear_cross_entropy(x.hidden, x.weight, ignoring(x))


@entry("nll", "hidden", supports={"softcap": ANY})
def torch_compile(x, o, mesh):
    given = {"softcap": o.softcap, "reduction": "sum"}
    return mean(x, compiled.torch_compile_linear_cross_entropy(x.hidden, x.weight, ignoring(x), **given))


@entry("nll", "hidden", counts="own", untrained="nan")
def torch_compile_mean(x, o, mesh):
    return compiled.torch_compile_linear_cross_entropy(x.hidden, x.weight, ignoring(x))
