# SPDX-License-Identifier: Apache-2.0
"""The binary floating-point formats in which kernels compute."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from lossgate.base.names import DTYPES


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format."""

    dtype: torch.dtype
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
        """Distance between neighbours below the smallest normal number. It is that number itself if
        hardware may flush smaller ones to zero.
        """
        return 2.0 ** (self.min_exponent if self.flushes else self.min_exponent + 1 - self.bits)

    def error(self, x: Tensor) -> Tensor:
        """Returns the most by which rounding to the format changes each number."""
        return x.abs().clamp_(min=self.spacing / (2 * self.unit)).mul_(self.unit)

    def nearest(self, x: Tensor) -> Tensor:
        """Returns the nearest numbers of the format, as float64."""
        return x.to(self.dtype).double()


FLOAT_FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        "float32": FloatFormat(torch.float32, 24, -126, True),
        "bfloat16": FloatFormat(torch.bfloat16, 8, -126, True),
        "float16": FloatFormat(torch.float16, 11, -14, False),
    }
)
FLOAT32 = FLOAT_FORMATS["float32"]

TF32 = FloatFormat(torch.float32, 11, -126, True)
"""The format to which NVIDIA's tensor cores round a float32 factor. Its numbers are stored as
float32."""

_BY_NAME: Any = {**FLOAT_FORMATS, "tf32": TF32}

RoundedTo = Literal["float32", "bfloat16", "float16", "tf32"]

ROUNDED_TO: Mapping[RoundedTo, FloatFormat] = MappingProxyType(_BY_NAME)
"""The formats to which kernels round numbers, by name: the dtypes of inputs, and "tf32"."""

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: getattr(torch, name) for name in DTYPES})
"""The torch dtype of each name."""


def coarsest_of(names: Iterable[RoundedTo]) -> RoundedTo:
    """Returns the name of the coarsest format; see ``coarsest``."""
    return max(names, key=lambda name: _coarseness(ROUNDED_TO[name]))


def coarsest(*formats: FloatFormat) -> FloatFormat:
    """Returns the format with the largest unit roundoff. If several have it, the one with the
    smallest range.
    """
    return max(formats, key=_coarseness)


def _coarseness(format_: FloatFormat) -> tuple[float, float]:
    return format_.unit, -torch.finfo(format_.dtype).max


def float_format_of(dtype: torch.dtype) -> FloatFormat:
    """Returns the format of a torch dtype: float32, bfloat16 or float16."""
    return FLOAT_FORMATS[str(dtype).removeprefix("torch.")]
