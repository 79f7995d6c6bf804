# SPDX-License-Identifier: Apache-2.0
"""How problems may make the inputs that specs have in common."""

from lossgate.specs.spec import Option

SAMPLES = Option(name="samples", meaning="which sequences count", default="all", choices=("all", "some"))
ADVANTAGES = Option(
    name="advantages",
    meaning="signs of the advantages",
    default="mixed",
    choices=("mixed", "mixed", "positive", "negative", "zero"),
)
RATIOS = Option(
    name="ratios",
    meaning="where importance ratios lie: well inside the clip, on every side of every clip, all exactly 1, or near overflow",
    default="inside",
    choices=("inside", "everywhere", "everywhere", "everywhere", "on-policy", "extreme"),
)
REFERENCE = Option(
    name="reference",
    meaning="the reference policy: near, equal to the policy, or so far off that estimates are clamped",
    default="near",
    choices=("near", "far", "far", "equal"),
)
GENERATION = Option(
    name="generation",
    meaning="the policy that generated: near, equal to the one before the update, or on every side of every truncation",
    default="near",
    choices=("near", "everywhere", "everywhere", "equal"),
)
