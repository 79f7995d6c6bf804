# SPDX-License-Identifier: Apache-2.0
"""Mistakes of kernels that lay sequences out in rows, padded to the longest."""

from functools import partial

import torch

from lossgate.counterfactuals.batch_parts import rank_by_rank, reads_count
from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Part
from lossgate.counterfactuals.setting import Setting
from lossgate.diagnosis.observed import Observed


def means_over_rows(failing: Observed) -> list[Counterfactual]:
    """Returns the mistakes of a mean over all entries of rows, as ``x.mean()`` is."""
    spec = failing.setting.spec
    if spec.reference is None or spec.trained_dim != "token":
        return []
    return [
        mistake(
            f"{name} is that of all entries of rows",
            f"the mean is over all entries of rows, padding included, and not over {name}",
            partial(_takes_rows, name),
            f"divide by {name}; .mean() divides by the number of entries",
            parts=partial(_parts, name),
        )
        for name in spec.names_of_counts
    ]


def _takes_rows(name: str, setting: Setting) -> bool:
    return setting.size("cp") == 1 and reads_count(setting, name)


def _parts(name: str, setting: Setting) -> list[Part]:
    given, found = setting.fields[name], list[Part]()
    for dp, (weight, fields) in enumerate(rank_by_rank(setting, ("dp",), ())):
        lengths = [setting.lengths[own] for own in setting.partition.sequences(dp)]
        found.append((weight, {**fields, name: torch.tensor(len(lengths) * max([1, *lengths])).to(given)}))
    return found
