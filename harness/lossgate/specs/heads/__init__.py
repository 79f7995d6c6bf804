# SPDX-License-Identifier: Apache-2.0
"""The heads, which are the points at which a kernel may start. Each has a file of its own."""

from collections.abc import Mapping
from types import MappingProxyType

from lossgate.specs.heads.head import Head
from lossgate.specs.heads.hidden import HiddenHead
from lossgate.specs.heads.logits import LogitsHead
from lossgate.specs.heads.value_heads import LogprobsHead, RewardsHead, ValuesHead

HEADS: Mapping[str, Head] = MappingProxyType(
    {head.name: head for head in (HiddenHead(), LogitsHead(), LogprobsHead(), ValuesHead(), RewardsHead())}
)
