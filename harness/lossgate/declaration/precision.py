# SPDX-License-Identifier: Apache-2.0
"""Where a kernel rounds: the declaration from which the judge's tolerances come."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lossgate.base.argument import Argument, arguments
from lossgate.base.names import DTYPES, named, nearest_dtype
from lossgate.numerics.float_formats import FLOAT_FORMATS, ROUNDED_TO, TF32, RoundedTo, coarsest, coarsest_of
from lossgate.numerics.rounded_arithmetic import Stages

_COUNTED = {"chunk": "tokens", "vocab_chunk": "rows"}
_WORDS = {"products": ("float32", "tf32", "bfloat16", "float16"), "accumulators": ("rounded", "truncated")}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype to which a kernel rounds at each stage.

    All arithmetic in between is assumed to be in float32.

    Declare the dtypes that the kernel really uses. If you declare a finer dtype, the kernel ends in
    DISAGREE; if you declare a coarser one, the judge sees less.

    Raises:
        UsageError: if a dtype or a word is unknown, a number is not positive, or
            ``grads_in_forward`` is no bool.
    """

    logits: str = "float32"
    """Logits, before and after bias, soft-cap and temperature."""
    logsumexp: str = "float32"
    """The sum of exponentials over the vocabulary, and its logarithm."""
    logprobs: str = "float32"
    """The log-softmax. Log-probabilities are read from it, and backward computes the softmax from
    it."""
    entropy: str = "float32"
    """Entropies, and each of the terms that add up to an entropy."""
    dlogits: str = "float32"
    """The gradient of the logits, before it is multiplied by weight and hidden states. At head
    "logits" it is an output."""
    accumulate: str = "float32"
    """The running sum of the weight's (and bias's) gradient over chunks of ``chunk`` tokens."""
    chunk: int | None = None
    """Tokens per step of that running sum, counted on each rank; None for a single step. It matters
    only if ``accumulate`` is coarser than float32."""
    accumulate_hidden: str = "float32"
    """The running sum of the hidden states' gradient over steps of ``vocab_chunk`` rows of the
    vocabulary."""
    vocab_chunk: int | None = None
    """Rows of the vocabulary per step of that running sum, counted on each rank; None for a single
    step. It matters only if ``accumulate_hidden`` is coarser than float32."""
    reduce: str = "float32"
    """The parts of the hidden states' gradient that the kernel all-reduces over tp."""
    loss: str = "float32"
    """The stage from log-probabilities to the loss and back. Kernels may cast log-probabilities and
    other inputs to this dtype as they enter the stage."""
    returned: str | Mapping[str, str] | None = field(default=None, hash=False)
    """The dtype of outputs and metrics as they are returned: one for all, or a mapping by name. By
    default, and for names that are left out, it is that of ``loss``. Loss and metrics are not
    computed in it. Log-probabilities and entropies are rounded to ``logprobs`` and ``entropy``, and
    then only to this dtype."""
    products: RoundedTo = "float32"
    """How the factors of products are rounded: not at all; to the 10 bits of TF32, as
    ``torch.backends.cuda.matmul.allow_tf32`` and Triton's ``tl.dot`` do with float32; or to
    bfloat16 or float16, as under ``torch.autocast``. Gradients are then rounded to that dtype, too,
    as they are products."""
    accumulators: Literal["rounded", "truncated"] = "rounded"
    """How products are added up: rounded to nearest, or toward zero, as tensor cores do."""

    grads_in_forward: bool = False
    """The kernel computes gradients in forward, rounds them to the inputs' dtype, and multiplies
    them by the upstream gradient in backward: they are rounded twice."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, named(value))
        for name, given in arguments("Precision(", vars(self)).items():
            if name == "grads_in_forward":
                given.truth()
            elif name in _COUNTED:
                if given.value is not None:
                    given.count(f"a positive number of {_COUNTED[name]}, or None")
            elif name in _WORDS:
                given.one_of(_WORDS[name])
            elif name == "returned":
                given.instance(str | Mapping | None, "a dtype, or a mapping such as {'logprobs': 'float32'}")
                for dtype in self._named_dtypes.values():
                    given.known(dtype, DTYPES, "unknown dtype", nearest_dtype)
            else:
                given.one_of(DTYPES, near=nearest_dtype)

    def dtype_of(self, name: str) -> str:
        """Returns the dtype in which the output or metric of a name is returned."""
        given = self._named_dtypes
        return given.get(name, given.get("", self.loss))

    def check_names(self, known: Sequence[str]) -> None:
        """Checks the names in ``returned``.

        Args:
            known: the outputs and metrics of the spec.

        Raises:
            UsageError: if a name is unknown.
        """
        given = Argument("Precision(", "returned", self.returned)
        for name in self._named_dtypes:
            if name:
                given.known(name, known, "unknown output or metric")

    @property
    def _named_dtypes(self) -> Mapping[str, str]:
        """The dtypes of outputs by name; "" is for all others."""
        return {"": self.returned} if isinstance(self.returned, str) else self.returned or {}

    def coarsest(self, dtype: str, stages: Iterable[str]) -> RoundedTo:
        """Returns the coarsest format to which the inputs of the loss are rounded: the name of a
        dtype, or "tf32".

        Args:
            dtype: of the kernel's inputs.
            stages: the names of the stages that the kernel has.
        """
        names: Any = (dtype, *(getattr(self, stage) for stage in stages))
        return coarsest_of(names)

    def stages(self, dtype: str, *, caller_reduces_hidden: bool) -> Stages:
        """Returns the float format of each stage.

        Args:
            dtype: of the kernel's inputs.
            caller_reduces_hidden: whether the kernel returns the parts of the hidden states'
                gradient in the inputs' dtype, and its caller adds them up over tp.
        """
        inputs, products = FLOAT_FORMATS[dtype], ROUNDED_TO[self.products]
        return Stages(
            inputs=inputs,
            logits=FLOAT_FORMATS[self.logits],
            logsumexp=FLOAT_FORMATS[self.logsumexp],
            logprobs=FLOAT_FORMATS[self.logprobs],
            entropy=FLOAT_FORMATS[self.entropy],
            dlogits=FLOAT_FORMATS[self.dlogits],
            accumulate=FLOAT_FORMATS[self.accumulate],
            accumulate_hidden=FLOAT_FORMATS[self.accumulate_hidden],
            vocab_chunk=self.vocab_chunk,
            reduce_hidden=FLOAT_FORMATS[dtype if caller_reduces_hidden else self.reduce],
            loss=FLOAT_FORMATS[self.loss],
            returned=tuple((name, FLOAT_FORMATS[one]) for name, one in self._named_dtypes.items()),
            products=products,
            gradients=inputs if products == TF32 else coarsest(inputs, products),
            truncates=self.accumulators == "truncated",
            chunk=self.chunk,
            grads_in_forward=self.grads_in_forward,
        )
