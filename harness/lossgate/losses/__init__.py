# SPDX-License-Identifier: Apache-2.0
"""The losses that lossgate knows."""

from collections.abc import Mapping
from types import MappingProxyType

from lossgate.errors import UsageError
from lossgate.losses.clipped_pg import CLIPPED_PG
from lossgate.losses.distill import DISTILL
from lossgate.losses.dpo import DPO, PREFERENCE
from lossgate.losses.grpo import GRPO
from lossgate.losses.nll import NLL
from lossgate.losses.token_logprobs import TOKEN_LOGPROBS
from lossgate.losses.value import VALUE
from lossgate.specs.spec import Spec

SPECS: Mapping[str, Spec] = MappingProxyType(
    {spec.name: spec for spec in (NLL, DPO, PREFERENCE, CLIPPED_PG, GRPO, VALUE, DISTILL, TOKEN_LOGPROBS)}
)


def find_spec(name: str) -> Spec:
    if name not in SPECS:
        raise UsageError(f"unknown spec {name!r}; expected one of {', '.join(SPECS)} (see 'lossgate list')")
    return SPECS[name]
