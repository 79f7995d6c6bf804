# SPDX-License-Identifier: Apache-2.0
"""The losses that lossgate knows, one file each.

A new one is added here and in its own file, nowhere else.
"""

from collections.abc import Mapping
from types import MappingProxyType

from lossgate.losses.clipped_pg import CLIPPED_PG
from lossgate.losses.distill import DISTILL
from lossgate.losses.dpo import DPO, PREFERENCE
from lossgate.losses.grpo import GRPO
from lossgate.losses.nll import NLL
from lossgate.losses.token_logprobs import TOKEN_LOGPROBS
from lossgate.losses.value import VALUE
from lossgate.specs.spec import Spec
from lossgate.spelling import look_up

SPECS: Mapping[str, Spec] = MappingProxyType(
    {spec.name: spec for spec in (NLL, DPO, PREFERENCE, CLIPPED_PG, GRPO, VALUE, DISTILL, TOKEN_LOGPROBS)}
)


def find_spec(name: str) -> Spec:
    """Returns the spec of a name; ``UsageError`` with the nearest spelling if there is none."""
    return look_up("spec", name, SPECS)
