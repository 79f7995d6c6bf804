# SPDX-License-Identifier: Apache-2.0
"""Kernels that show where Triton's interpreter differs from a GPU; prints what they do as JSON.

Run with TRITON_INTERPRET=1.
"""

import json
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _products(x, y, out, N: tl.constexpr, CONVERT: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    if CONVERT:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(out + at, (a * b).to(tl.float32))


@triton.jit
def _copy(x, out, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at))


def bfloat16_products_are_right(convert: bool) -> bool:
    x, y = (torch.randn(64).bfloat16() for _ in range(2))
    out = torch.empty(64)
    _products[(1,)](x, y, out, N=64, CONVERT=convert)
    return bool((out - x.float() * y.float()).abs().max() < 0.1)


def stores_to_bfloat16_cut_off() -> bool:
    x, out = torch.randn(64), torch.empty(64, dtype=torch.bfloat16)
    _copy[(1,)](x, out, N=64)
    cut_off = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return torch.equal(out.float(), cut_off) and not torch.equal(out, x.bfloat16())


def loads_out_of_bounds_return_what_lies_there() -> bool:
    row, out = torch.arange(8.0), torch.empty(8)
    _copy[(1,)](row[:4], out, N=8)
    return torch.equal(out, row)


if __name__ == "__main__":
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "bfloat16 products, converted": bfloat16_products_are_right(True),
        "bfloat16 products": bfloat16_products_are_right(False),
        "stores to bfloat16 cut off": stores_to_bfloat16_cut_off(),
        "loads out of bounds return what lies there": loads_out_of_bounds_return_what_lies_there(),
    }
    print(json.dumps(found))
