# SPDX-License-Identifier: Apache-2.0
"""Right kernels for every spec and head, written in many different ways, in every dtype.

They share no code with the references. Each is made of parts that combine: how log-probabilities
are made (``logprobs``), how the loss is written (``sft``, ``policies``, ``pairs``, ``critics``,
``distillation``, ``tokens``), where it rounds (``formats``), and how it goes over its tokens
(``loops``). Its declaration says where it rounds as truly as the words of ``Precision`` can.

    lossgate verify kernel_bank.right:nll_hidden_online_trained --dtype float16
"""

from collections.abc import Mapping
from dataclasses import replace

from kernel_bank.right import critics, cut, distillation, pairs, policies, sft, tokens
from lossgate.declaration.candidate import Candidate

_MODULES = (sft, cut, tokens, policies, pairs, critics, distillation)

KERNELS: Mapping[str, Candidate] = {
    kernel.name: replace(kernel, source=f"{__name__}:{kernel.name}") for module in _MODULES for kernel in module.KERNELS
}
"""By name: the spec, the head, how it is written, and the dtypes of its stages."""

globals().update(KERNELS)
