# SPDX-License-Identifier: Apache-2.0
"""Candidates that are given whole sequences, made from those that are given shards: right ones, and
those with a known bug of shift and split.

They shift and split in a way of their own: along the padded pack, token by token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kernel_bank.bugs import scale_gradient
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.dense_candidates import whole_pack, zigzag_order
from lossgate.problems.whole_sequences import Tokens

InputBug = Literal[
    "shift after split",
    "mask not shifted",
    "labels not shifted",
    "fields not shifted",
    "rolled over the end",
    "last token trained",
    "padding before a sequence trained",
    "true offsets for padded",
    "cp order of pieces",
]
INPUT_BUGS: Mapping[InputBug, str] = {
    "shift after split": "each cp rank rolls its own tokens: labels at the ends of its pieces are wrong",
    "mask not shifted": "the mask of a token is taken for that of its prediction of the next one",
    "labels not shifted": "each token is its own label",
    "fields not shifted": "log-probabilities and advantages of a token are taken for those of its prediction",
    "rolled over the end": "rows or pack are rolled, with the mask: the last token predicts the first one that follows",
    "last token trained": "the last token of each sequence is trained, though it has no label",
    "padding before a sequence trained": "a pack is rolled, with the mask: the padding before a sequence predicts it",
    "true offsets for padded": "sequences are looked for where they would start without padding",
    "cp order of pieces": "rank r of cp takes the pieces 2 r and 2 r + 1, while the model works in a zigzag",
}
"""Bugs in what a kernel makes of whole sequences, and their sentences."""

OutputBug = Literal[
    "not gathered", "ranks end to end", "outputs not shifted", "true offsets for padded", "cp gradient x cp"
]
OUTPUT_BUGS: Mapping[OutputBug, str] = {
    "not gathered": "each cp rank returns its own tokens, and 0 for those of others",
    "ranks end to end": "the tokens of cp ranks are laid end to end, not in a zigzag",
    "outputs not shifted": "what is predicted of a token is returned at the token before it",
    "true offsets for padded": "sequences are looked for where they would start without padding",
    "cp gradient x cp": "gradients are cp times too large: every cp rank's part comes back from all of them",
}
"""Bugs in what a kernel returns for whole sequences, and their sentences."""


def given_whole(candidate: Candidate, tokens: Tokens, bug: InputBug | None = None) -> Candidate:
    """Returns a candidate of shards as one that is given whole sequences.

    Args:
        candidate: it is given shards.
        tokens: "rows" or "packed".
        bug: what it does wrong; None for nothing.
    """

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs | Tensor:
        own = _Split(inputs, mesh, tokens, bug)
        added = [name for name, dims in candidate.spec.fields.items() if "token" in dims]
        of_tokens = ("labels", "mask", "input_ids", *added)
        fields = {name: own.field(name, candidate.spec.unshifted) for name in of_tokens}
        return candidate.kernel(replace(inputs, **fields, sequence=own.sequence), options, mesh)

    return replace(candidate, kernel=kernel, tokens=tokens, name=f"{candidate.name} of {tokens}; {bug}")


def returning_whole(candidate: Candidate, bug: OutputBug | None = None) -> Candidate:
    """Returns a candidate that is given whole sequences as one that returns them on every cp rank.

    Args:
        candidate: it is given whole sequences, and returns shards.
        bug: what it does wrong; None for nothing.
    """

    def kernel(inputs: Any, options: Any, mesh: DeviceMesh) -> Outputs:
        outputs = candidate.kernel(inputs, options, mesh)
        assert isinstance(outputs, Outputs)
        values = {name: getattr(outputs, name) for name in ("logprobs", "token_entropy")}
        return replace(
            outputs, **{name: _whole(value, inputs, mesh, candidate.tokens, bug) for name, value in values.items()}
        )

    contract = replace(candidate.contract, logprobs={"cp": "replicate"})
    return replace(candidate, kernel=kernel, contract=contract, name=f"{candidate.name}, returned; {bug}")


@dataclass(frozen=True)
class _Split:
    """Shifts whole sequences and splits them over cp."""

    inputs: Any
    mesh: DeviceMesh
    tokens: Tokens
    bug: InputBug | None

    def field(self, name: str, unshifted: frozenset[str]) -> Tensor:
        """Returns this rank's tokens of a field."""
        bug, whole = self.bug, getattr(self.inputs, name)
        kind = name if name in ("labels", "mask") else "fields"
        shifted = name not in unshifted and bug != f"{kind} not shifted"
        if bug == "shift after split":
            local = self._own(self._pack(whole))
            return local.roll(-1, 0) if shifted else local
        if bug == "rolled over the end":
            return self._own(self._pack(whole.roll(-1, 1) if shifted else whole))
        pack, length = self._pack(whole, int(shifted)), self.inputs.cu_seqlens.diff()[self._sequence]
        if whole.dtype is torch.bool:
            pack &= self._position + shifted < length
        if name == "mask" and bug == "last token trained":
            pack |= self._position == length - 1
        if name == "mask" and bug == "padding before a sequence trained":
            pack |= self._padding_before & self._pack(whole, 1)
        return self._own(pack)

    @property
    def sequence(self) -> Tensor:
        return self._own(self._sequence)

    @property
    def _sequence(self) -> Tensor:
        """The sequence of each token of the padded pack."""
        lengths = self.inputs.cu_seqlens_padded.diff()
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    @property
    def _position(self) -> Tensor:
        sequence = self._sequence
        return torch.arange(len(sequence)) - self.inputs.cu_seqlens_padded[sequence]

    @property
    def _padding_before(self) -> Tensor:
        """The last padding token of each sequence that has padding."""
        length, padded = self.inputs.cu_seqlens.diff(), self.inputs.cu_seqlens_padded.diff()
        return (self._position == (padded - 1)[self._sequence]) & (padded > length)[self._sequence]

    def _pack(self, whole: Tensor, later: int = 0) -> Tensor:
        """Returns, for each token of the padded pack, the entry so much later in its sequence.

        Beyond the end of the sequence the entry is any.
        """
        sequence, column = self._sequence, self._position + later
        if not len(sequence):
            return whole.flatten(0, 1)[:0]
        if self.bug == "true offsets for padded":
            flat = whole.flatten(0, 1)
            return flat[(self.inputs.cu_seqlens[sequence] + column).clamp(max=len(flat) - 1)]
        if self.tokens == "packed":
            return whole[0][(self.inputs.cu_seqlens_padded[sequence] + column).clamp(max=whole.shape[1] - 1)]
        return whole[sequence, column.clamp(max=whole.shape[1] - 1)]

    def _own(self, pack: Tensor) -> Tensor:
        cp, starts = self.mesh["cp"].size(), self.inputs.cu_seqlens_padded.tolist()
        order = zigzag_order(starts, cp).view(cp, -1 if starts[-1] else 0)
        if self.bug == "cp order of pieces" and cp > 1:
            position, piece = self._position, (self.inputs.cu_seqlens_padded.diff() // (2 * cp))[self._sequence]
            owner = torch.div(position, 2 * piece.clamp(min=1), rounding_mode="floor")
            order = owner.argsort(stable=True).view_as(order)
        return pack[order[self.mesh.get_local_rank("cp")]]


def _whole(local: Tensor, inputs: Any, mesh: DeviceMesh, tokens: Tokens, bug: OutputBug | None) -> Tensor:
    """Returns values of this rank's predictions as whole sequences, each at the token that is
    predicted.
    """
    group, starts = mesh.get_group("cp"), inputs.cu_seqlens_padded
    order = zigzag_order(starts.tolist(), group.size())
    if bug == "not gathered":
        own = order.view(group.size(), -1 if len(order) else 0)[group.rank()]
        pack = local.new_zeros(len(order)).index_put((own,), local)
    else:
        pack = whole_pack(local, inputs, mesh)
    if bug == "ranks end to end":
        pack = pack[order]
    if bug == "cp gradient x cp":
        pack = scale_gradient(pack, group.size())
    if not len(pack):
        return local.new_zeros(inputs.input_ids.shape) + 0 * local.sum()
    offsets = inputs.cu_seqlens if bug == "true offsets for padded" else starts
    columns = torch.arange(inputs.input_ids.shape[1])
    position = columns if tokens == "rows" else columns - starts[inputs.sequence]
    before = position - int(bug != "outputs not shifted")
    index = offsets[inputs.sequence] + before
    here = (before >= 0) & (before < inputs.cu_seqlens.diff()[inputs.sequence])
    return torch.where(here, pack[index.clamp(0, len(pack) - 1)], 0.0)
