# SPDX-License-Identifier: Apache-2.0
"""The originals' own published tests, made again from descriptions of them.

One file stands for each original, with the sizes, options and layouts of its tests; its docstring
names the repository and the paths. The originals compare a fused path with an unfused one, mostly
on GPUs. Here both are compared with the dense references, at a hundredth of the tolerance; see
``comparison``. What the originals left out is added where it is free: gradients, several chunks,
more ranks, other upstream gradients than 1.
"""
