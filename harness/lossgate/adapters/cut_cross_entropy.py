# SPDX-License-Identifier: Apache-2.0
"""Cut Cross-Entropy, as it is for torch.compile. Its Triton kernels need a GPU and bfloat16.

Not judged: `linear_cross_entropy` with its default `impl`, and `filter_eps`, whose Triton kernels
need a GPU; `shift`, which has no adapter yet.
"""

# pyright: reportMissingParameterType=false

from lossgate.adapters.support import entry_of, ignoring, load, mean, rounds
from lossgate.declaration.supports import ANY

entry = entry_of("cut_cross_entropy")
compiled = load("cut_cross_entropy", "cut_cross_entropy.torch_compile")


@entry("nll", "hidden", **rounds("logits", "dlogits"), supports={"softcap": ANY})
def torch_compile(x, o, mesh):
    given = x.hidden, x.weight, ignoring(x)
    return mean(x, compiled.torch_compile_linear_cross_entropy(*given, softcap=o.softcap, reduction="sum"))


@entry("nll", "hidden", **rounds("logits", "dlogits"), counts="own", untrained="nan")
def torch_compile_mean(x, o, mesh):
    return compiled.torch_compile_linear_cross_entropy(x.hidden, x.weight, ignoring(x))
