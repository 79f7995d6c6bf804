# SPDX-License-Identifier: Apache-2.0
"""The limit of each statistic, from an ensemble of correct runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lossgate.judge.noise_model import NoiseModel
from lossgate.judge.rows import Stack
from lossgate.judge.statistics import NOISE, SCALE, WORST, Blocks, Statistic, statistics

FACTORS: Mapping[str, float] = {NOISE: 2.5, WORST: 3.0}
BLOCK_FACTOR = 3.0
"""Limits: these factors of the largest value among the members. With them, and ``scale_sigmas``, no
correct kernel of ``benchmarks/calibration.py`` is rejected; ``judge.md`` has its figures."""

ALIKE_FACTOR = 1.5
"""What a kernel may deviate by is at least this factor of what the runs do that round equal numbers
alike: it does nearly what one of them does."""


@dataclass(frozen=True)
class Limits:
    """What the ensemble says of each statistic."""

    of: Mapping[str, float]
    """The limit of each statistic."""
    sd: float
    """Root mean square of SCALE over the members."""
    mean: float
    """Mean of SCALE over the members."""
    noise: float
    """The largest NOISE of the runs, of those that round equal numbers alike, and of the rounded
    reference; for a number, the largest abs(SCALE)."""


def limits(model: NoiseModel, blocks: Sequence[Blocks], allowed: float, alike: Stack, rounded: Stack) -> Limits:
    """Returns the limit of each statistic.

    Args:
        model: of the noise.
        blocks: the ways to cut the output into blocks.
        allowed: what rounding may do to the whole output alike, relative to it.
        alike: ``[n, *shape]``, the deviations of runs that round equal numbers alike.
        rounded: ``[1, *shape]``, the deviation of the reference as the output's dtype holds it.
    """
    members = statistics(model.of_members, model.reference, model.precision_without_each, blocks)
    sd = float(members[SCALE].values.square().mean().sqrt())
    limit = {
        name: FACTORS.get(name, BLOCK_FACTOR) * float(statistic.values.max()) for name, statistic in members.items()
    }
    of_alike = statistics(alike, model.reference, model.precision, ())
    for name, statistic in of_alike.items():
        limit[name] = max(limit[name], ALIKE_FACTOR * float(statistic.values.max()))
    limit[SCALE] = allowed + scale_sigmas(model.members) * sd
    of_rounded = statistics(rounded, model.reference, model.precision, ())
    noise = max(float(noise_of(runs).max()) for runs in (members, of_alike, of_rounded))
    return Limits(limit, sd, float(members[SCALE].values.mean()), noise)


def noise_of(found: Mapping[str, Statistic]) -> Tensor:
    """Returns how noisy each result is, ``[n]``. A number has SCALE alone."""
    return found[NOISE].values if NOISE in found else found[SCALE].values.abs()


def scale_sigmas(members: int) -> float:
    """Returns how many standard deviations of SCALE are allowed: five, and more for few members.

    The standard deviation is itself estimated. With twelve members or more, the result is within a
    tenth of the quantile of Student's t at 1e-6, and with fewer it is that quantile.
    """
    return _QUANTILES.get(members, 5 * (1 + 8 / members))


_QUANTILES = dict(enumerate((636_620, 1000, 130.2, 49.5, 28.5, 20.1, 15.8, 13.3, 11.7, 10.6, 9.7), 1))
"""Those of Student's t at 1e-6, by the degrees of freedom."""
