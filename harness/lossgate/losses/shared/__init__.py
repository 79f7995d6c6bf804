# SPDX-License-Identifier: Apache-2.0
"""Parts that several losses share: sequences that count, and log-probabilities of other
policies."""
