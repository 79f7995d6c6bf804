# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the bank that is known to be right, in every dtype that it can do.

Beside ``kernel_bank.right`` these are the dense candidates, which alone support every option, the
kernels for losses over the whole vocabulary, and the fused cross-entropy in all its styles.
"""

from collections.abc import Iterator
from dataclasses import replace

from kernel_bank import full_vocabulary
from kernel_bank.cross_entropy import ALL_BFLOAT16, STYLES, make
from kernel_bank.right import KERNELS
from lossgate.base.names import DTYPES
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.precision import Precision
from lossgate.dense_candidates import dense_candidate
from lossgate.losses import SPECS


def known_right() -> tuple[Candidate, ...]:
    """Returns the kernels, each under a name of its own."""
    return (*KERNELS.values(), *_OTHERS.values())


def _fine() -> Iterator[Candidate]:
    """Yields the kernels that compute in float32, whatever the dtype of their inputs."""
    fine: list[Candidate] = [dense_candidate(spec, head) for spec in SPECS.values() for head in spec.inputs]
    for spec in full_vocabulary.LOSSES:
        for style in full_vocabulary.STYLES:
            fine += [full_vocabulary.make(spec, head, style) for head in ("hidden", "logits")]
    for kernel in fine:
        yield replace(kernel, dtypes=DTYPES, precision=dict.fromkeys(DTYPES, Precision()))


def _cross_entropies() -> Iterator[Candidate]:
    styles = {**STYLES, "bfloat16": (*STYLES["bfloat16"], ALL_BFLOAT16)}
    for dtype, of_dtype in styles.items():
        for style in of_dtype:
            kernel = make(style)
            yield replace(kernel, dtypes=(dtype,), precision={dtype: style.precision}, name=f"{style.name} ({dtype})")


_OTHERS = {k.name: replace(k, source=f"{__name__}:{k.name}") for k in (*_fine(), *_cross_entropies())}
"""Those that are not in ``kernel_bank.right``."""

globals().update(_OTHERS)
