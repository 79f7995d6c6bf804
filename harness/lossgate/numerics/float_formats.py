# SPDX-License-Identifier: Apache-2.0
"""The binary floating-point formats in which kernels compute."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lossgate.dtypes import DTYPES


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format."""

    bits: int
    """Bits of the significand, the hidden one included."""
    min_exponent: int
    """The smallest normal number is ``2 ** min_exponent``."""
    flushes: bool
    """Hardware may replace numbers below the smallest normal one by zero."""

    @property
    def unit(self) -> float:
        """Unit roundoff u: rounding to nearest is off by at most u times the value."""
        return 2.0**-self.bits

    @property
    def spacing(self) -> float:
        """Distance between neighbours below the smallest normal number, as far as hardware
        guarantees it.
        """
        return 2.0 ** (self.min_exponent if self.flushes else self.min_exponent + 1 - self.bits)


FLOAT_FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        "float32": FloatFormat(24, -126, True),
        "bfloat16": FloatFormat(8, -126, True),
        "float16": FloatFormat(11, -14, False),
    }
)
FLOAT32 = FLOAT_FORMATS["float32"]

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in DTYPES})
"""The torch dtype of each name."""


def float_format_of(dtype: torch.dtype) -> FloatFormat:
    """Returns the format of a torch dtype: float32, bfloat16 or float16."""
    return FLOAT_FORMATS[str(dtype).removeprefix("torch.")]
