# SPDX-License-Identifier: Apache-2.0
"""With its default options, linear_cross_entropy adds a bfloat16 loss up in bfloat16.

Cause: torch/nn/modules/linear_cross_entropy.py
    output_dtype = acc_dtype if dtype == torch.float16 else dtype

acc_dtype is not used for bfloat16.
"""

import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import cross_entropy, linear_cross_entropy

torch.manual_seed(0)
hidden, weight = torch.randn(256, 8).bfloat16(), torch.randn(512, 8).mul(0.1).bfloat16()
labels = torch.randint(512, (256,))
got = linear_cross_entropy(hidden, weight, labels, reduction="sum", options=LinearCrossEntropyOptions()).item()
want = cross_entropy(hidden.double() @ weight.double().T, labels, reduction="sum").item()
print(f"loss: got {got:.2f}, want {want:.2f}; rounding it once explains {want * 2**-9:.2f}")
raise SystemExit(abs(got - want) > 2 * want * 2**-9)
