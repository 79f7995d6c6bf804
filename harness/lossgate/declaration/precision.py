# SPDX-License-Identifier: Apache-2.0
"""Where a kernel rounds: the declaration from which the judge's tolerances come."""

from dataclasses import dataclass, fields

from lossgate.dtypes import DTYPES
from lossgate.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype to which a kernel rounds at each stage; everything in between is taken to be float32.

    Declare what the kernel does: claiming a finer dtype ends in DISAGREE, claiming a coarser one only costs power.
    """

    logits: str = "float32"
    """Logits, before and after temperature and bias."""
    logsumexp: str = "float32"
    """The sum of exponentials over the vocabulary, and its logarithm."""
    logprobs: str = "float32"
    """The log-softmax from which log-probabilities are read and softmax is rebuilt in backward."""
    dlogits: str = "float32"
    """The gradient of the logits, before it is multiplied by weight and hidden. For head "logits" it is an output."""
    accumulate: str = "float32"
    """The running sum of the weight's (and bias's) gradient over chunks of ``chunk`` tokens."""
    chunk: int | None = None
    """Tokens per step of that running sum, counted on each rank; None for a single step. Matters only where
    ``accumulate`` is coarser than float32."""
    reduce: str = "float32"
    """What the kernel all-reduces of the hidden states' gradient over tp."""
    loss: str = "float32"
    """The stage from log-probabilities to loss and back, and what is returned of it: loss, log-probabilities, metrics."""

    grads_in_forward: bool = False
    """Gradients are computed in forward, rounded to the inputs' dtype, and multiplied by the upstream gradient in
    backward: they are rounded twice."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "grads_in_forward":
                if not isinstance(value, bool):
                    raise UsageError(f"Precision(grads_in_forward={value!r}): expected True or False")
            elif f.name == "chunk":
                if value is not None and (not isinstance(value, int) or value < 1):
                    raise UsageError(f"Precision(chunk={value!r}): expected a positive number of tokens, or None")
            elif value not in DTYPES:
                raise UsageError(f"Precision({f.name}={value!r}): expected one of {', '.join(DTYPES)}")
