# SPDX-License-Identifier: Apache-2.0
"""The comparison of all files here: at a hundredth of an original's tolerance."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def assert_agrees(found: Any, expected: Any, published: float) -> None:
    """Compares at a hundredth of a published tolerance, relative and absolute.

    A tolerance below the rounding of float32 moves a test to float64. There it is 1e-12, or the
    hundredth if that is smaller still, since nothing rounds to more.

    An absolute tolerance would accept any gradient whose entries are all below it. So entries of a
    tensor that are all below 1 are divided by the largest expected one first, which is stricter.

    Args:
        found: what is tested: a tensor, or a sequence or mapping of them.
        expected: the same of the reference, in any float dtype.
        published: the original's tolerance.

    Raises:
        AssertionError: They differ by more, or have different names or lengths.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), [expected[name] for name in found]
    if isinstance(expected, Sequence):
        for one, other in zip(found, expected, strict=True):
            assert_agrees(one, other, published)
        return
    tolerance = published / 100
    if found.dtype == torch.float64:
        tolerance = min(tolerance, 1e-12)
    expected = expected.detach()
    largest = _largest(expected)
    scale = largest if expected.dim() and 0 < largest < 1 else 1.0
    torch.testing.assert_close(
        found.detach().to(expected.dtype) / scale, expected / scale, rtol=tolerance, atol=tolerance
    )


def _largest(x: Tensor) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0
