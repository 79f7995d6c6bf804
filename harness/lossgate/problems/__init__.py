# SPDX-License-Identifier: Apache-2.0
"""Problems, on which candidates are run: their split over ranks and their tensors."""
