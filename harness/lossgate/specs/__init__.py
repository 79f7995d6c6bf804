# SPDX-License-Identifier: Apache-2.0
"""The losses that lossgate knows."""

from collections.abc import Mapping
from types import MappingProxyType

from lossgate.errors import UsageError
from lossgate.specs.base import Spec
from lossgate.specs.nll import NLL

SPECS: Mapping[str, Spec] = MappingProxyType({spec.name: spec for spec in (NLL,)})


def find_spec(name: str) -> Spec:
    if name not in SPECS:
        raise UsageError(f"unknown spec {name!r}; expected one of {', '.join(SPECS)} (see 'lossgate list')")
    return SPECS[name]
