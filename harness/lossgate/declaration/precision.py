# SPDX-License-Identifier: Apache-2.0
"""Where a kernel rounds: the declaration from which the judge's tolerances come."""

from dataclasses import dataclass, fields

from lossgate.dtypes import DTYPES
from lossgate.errors import UsageError
from lossgate.numerics.float_formats import FLOAT_FORMATS
from lossgate.numerics.rounded_arithmetic import Stages
from lossgate.spelling import nearest


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype to which a kernel rounds at each stage.

    All arithmetic in between is assumed to be in float32.

    Declare what the kernel does. A finer dtype than it uses ends in DISAGREE; a coarser one makes
    the verdict less sharp.

    Raises:
        UsageError: if a dtype is unknown, ``chunk`` is not positive, or ``grads_in_forward`` is no
            bool.
    """

    logits: str = "float32"
    """Logits, before and after bias, soft-cap and temperature."""
    logsumexp: str = "float32"
    """The sum of exponentials over the vocabulary, and its logarithm."""
    logprobs: str = "float32"
    """The log-softmax, from which log-probabilities are read and backward rebuilds the softmax."""
    dlogits: str = "float32"
    """The gradient of the logits, before it is multiplied by weight and hidden states. At head
    "logits" it is an output."""
    accumulate: str = "float32"
    """The running sum of the weight's (and bias's) gradient over chunks of ``chunk`` tokens."""
    chunk: int | None = None
    """Tokens per step of that running sum, counted on each rank; None for a single step. It matters
    only if ``accumulate`` is coarser than float32."""
    reduce: str = "float32"
    """What the kernel all-reduces of the hidden states' gradient over tp."""
    loss: str = "float32"
    """The stage from log-probabilities to loss and back, and what is returned: loss,
    log-probabilities, metrics."""

    grads_in_forward: bool = False
    """The kernel computes gradients in forward, rounds them to the inputs' dtype, and multiplies
    them by the upstream gradient in backward: they are rounded twice."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "grads_in_forward":
                if not isinstance(value, bool):
                    raise UsageError(f"Precision(grads_in_forward={value!r}): expected True or False")
            elif f.name == "chunk":
                if value is not None and (type(value) is not int or value < 1):
                    raise UsageError(f"Precision(chunk={value!r}): expected a positive number of tokens, or None")
            elif value not in DTYPES:
                raise UsageError(f"Precision({f.name}={value!r}): {nearest(value, DTYPES)}")

    def stages(self, dtype: str, *, caller_reduces_hidden: bool) -> Stages:
        """Returns the float format of each stage.

        Args:
            dtype: of the kernel's inputs.
            caller_reduces_hidden: the parts of the hidden states' gradient are returned in the
                inputs' dtype and added up over tp by the caller.
        """
        return Stages(
            inputs=FLOAT_FORMATS[dtype],
            logits=FLOAT_FORMATS[self.logits],
            logsumexp=FLOAT_FORMATS[self.logsumexp],
            logprobs=FLOAT_FORMATS[self.logprobs],
            dlogits=FLOAT_FORMATS[self.dlogits],
            accumulate=FLOAT_FORMATS[self.accumulate],
            reduce_hidden=FLOAT_FORMATS[dtype if caller_reduces_hidden else self.reduce],
            loss=FLOAT_FORMATS[self.loss],
            chunk=self.chunk,
            grads_in_forward=self.grads_in_forward,
        )
