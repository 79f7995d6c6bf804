# SPDX-License-Identifier: Apache-2.0
"""All counterfactuals of a spec at a head: what it declares says which there are."""

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
from lossgate.counterfactuals.families.option_choices import options
from lossgate.counterfactuals.families.rank_shares import ranks
from lossgate.counterfactuals.families.sequence_pairs import pairs
from lossgate.counterfactuals.families.sequence_sums import sequence_sums
from lossgate.counterfactuals.families.softmax import entropies, softmaxes
from lossgate.counterfactuals.families.tensor_parallel import tensor_parallel
from lossgate.counterfactuals.families.token_masks import masks, pieces
from lossgate.counterfactuals.families.token_shifts import labels, moves
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
"""In the order in which names that are equal in effect are said."""


@cache
def counterfactuals_of(spec: Spec, head: str) -> Mapping[str, Counterfactual]:
    """Returns the counterfactuals of a spec at a head, by name."""
    found = [replace(one, kind=family.__name__) for family in FAMILIES for one in family(spec, head)]
    names = {one.name: one for one in found}
    assert len(names) == len(found), "two counterfactuals have one name"
    return names
