# SPDX-License-Identifier: Apache-2.0
"""All counterfactuals of a spec at a head. They follow from what the spec declares."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.chunks import chunks
from lossgate.counterfactuals.families.counts import counts, nothing_trained, own_parts
from lossgate.counterfactuals.families.factors import constants, upstreams
from lossgate.counterfactuals.families.fields import detached, inputs, memory
from lossgate.counterfactuals.families.logit_stages import filters, softcaps, temperatures
from lossgate.counterfactuals.families.loss_terms import weighted_terms
from lossgate.counterfactuals.families.metric_pools import metrics
from lossgate.counterfactuals.families.microbatches import microbatches
from lossgate.counterfactuals.families.option_values import options
from lossgate.counterfactuals.families.rank_shares import ranks
from lossgate.counterfactuals.families.sequence_pairs import pairs
from lossgate.counterfactuals.families.sequence_sums import sequence_sums
from lossgate.counterfactuals.families.shift_and_split import labels, moves
from lossgate.counterfactuals.families.softmax import entropies, softmaxes
from lossgate.counterfactuals.families.tensor_parallel import tensor_parallel
from lossgate.counterfactuals.families.token_masks import masks, pieces
from lossgate.counterfactuals.families.vocabulary import vocabulary
from lossgate.specs.spec import Spec

Family = Callable[[Spec, str], Iterator[Counterfactual]]

FAMILIES: tuple[Family, ...] = (
    options,
    temperatures,
    softcaps,
    softmaxes,
    entropies,
    tensor_parallel,
    filters,
    vocabulary,
    ranks,
    sequence_sums,
    own_parts,
    pairs,
    counts,
    masks,
    pieces,
    labels,
    moves,
    chunks,
    microbatches,
    nothing_trained,
    inputs,
    memory,
    detached,
    upstreams,
    weighted_terms,
    constants,
    metrics,
)
"""If several mistakes have the same effect, a diagnosis names those of the first families."""


@cache
def counterfactuals_of(spec: Spec, head: str) -> Mapping[str, Counterfactual]:
    """Returns the counterfactuals of a spec at a head, by name."""
    found = [replace(each, kind=family.__name__) for family in FAMILIES for each in family(spec, head)]
    by_name = {each.name: each for each in found}
    assert len(by_name) == len(found), "two counterfactuals have the same name"
    return by_name
