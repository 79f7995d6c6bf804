# SPDX-License-Identifier: Apache-2.0
"""The decks that are kept."""

from collections import OrderedDict

from lossgate.adequacy.deck import Deck, deck_key
from lossgate.declaration.candidate import Candidate
from lossgate.specs.spec import Spec

_KEPT = 4
"""Decks that are kept: they hold tensors, and cells are verified deck by deck."""

_DECKS: OrderedDict[tuple[Spec, str], Deck] = OrderedDict()
"""By the spec itself, as two specs may have one name, and by all else that a deck depends on."""


def deck_of(candidate: Candidate, dtype: str, seed: int) -> Deck:
    """Returns the deck for a candidate. It is kept for a while, for others that declare the same.

    Args:
        candidate: whose declaration says which problems can be drawn.
        dtype: of its inputs.
        seed: another seed draws other problems.
    """
    key = candidate.spec, f"{deck_key(candidate, dtype)} {seed}"
    deck = _DECKS.pop(key, None) or Deck(candidate, dtype, seed)
    _DECKS[key] = deck
    while len(_DECKS) > _KEPT:
        _DECKS.popitem(last=False)
    return deck
