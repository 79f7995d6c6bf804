# SPDX-License-Identifier: Apache-2.0
# Written by python -m lossgate.reports.spec_files: change the specs, and run that.
"""The options of each spec, as a kernel is given them."""

from dense_losses.distill import DistillOptions as DistillOptions
from dense_losses.value import ValueOptions as ValueOptions
from lossgate.losses.clipped_pg import ClippedPgOptions as ClippedPgOptions
from lossgate.losses.divergence import DivergenceOptions as DivergenceOptions
from lossgate.losses.dpo import DpoOptions as DpoOptions
from lossgate.losses.grpo import GrpoOptions as GrpoOptions
from lossgate.losses.label_smoothing import LabelSmoothingOptions as LabelSmoothingOptions
from lossgate.losses.nll import NllOptions as NllOptions
from lossgate.losses.preference import PreferenceOptions as PreferenceOptions
from lossgate.losses.softcap import SoftcapOptions as SoftcapOptions
from lossgate.losses.token_logprobs import TokenLogprobsOptions as TokenLogprobsOptions
from lossgate.losses.z_loss import ZLossOptions as ZLossOptions
