# SPDX-License-Identifier: Apache-2.0
"""All counterfactuals of a spec at a head: what it declares says which there are."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.chunks import chunks
from lossgate.counterfactuals.families.constants import constants
from lossgate.counterfactuals.families.counts import counts, own_parts
from lossgate.counterfactuals.families.entropy import entropies
from lossgate.counterfactuals.families.filters import filters
from lossgate.counterfactuals.families.inputs import detached, inputs
from lossgate.counterfactuals.families.masks import labels, masks, moves
from lossgate.counterfactuals.families.memory import memory
from lossgate.counterfactuals.families.metrics import metrics, metrics_together
from lossgate.counterfactuals.families.metrics_alone import metrics_alone
from lossgate.counterfactuals.families.microbatches import microbatches
from lossgate.counterfactuals.families.nothing import nothing_trained
from lossgate.counterfactuals.families.options import options
from lossgate.counterfactuals.families.pairs import pairs
from lossgate.counterfactuals.families.pieces import pieces
from lossgate.counterfactuals.families.ranks import ranks
from lossgate.counterfactuals.families.sequence_sums import sequence_sums
from lossgate.counterfactuals.families.softcap import softcaps
from lossgate.counterfactuals.families.softmax import softmaxes
from lossgate.counterfactuals.families.temperature import temperatures
from lossgate.counterfactuals.families.tensor_parallel import tensor_parallel
from lossgate.counterfactuals.families.upstream import upstreams
from lossgate.counterfactuals.families.vocabulary import vocabulary
from lossgate.counterfactuals.families.weighted_terms import weighted_terms
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
    metrics_together,
    metrics_alone,
)
"""In the order in which names that are equal in effect are said."""


@cache
def counterfactuals_of(spec: Spec, head: str) -> Mapping[str, Counterfactual]:
    """Returns the counterfactuals of a spec at a head, by name."""
    found = [one for family in FAMILIES for one in family(spec, head)]
    names = {one.name: one for one in found}
    assert len(names) == len(found), "two counterfactuals have one name"
    return names
