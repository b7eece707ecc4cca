"""Triton kernels of a GPU host, each behind a plain function of torch tensors; `ops.py` ties them to `AttentionOps`.

None of the functions looks at device data on the host: grids and tile sizes follow from shapes alone, so that a CUDA
graph can hold every launch, and so that `compile.py` can compile what they launch on a machine without a GPU.
"""
