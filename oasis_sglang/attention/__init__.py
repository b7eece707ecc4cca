"""Attention over working sets.

page_table.py  which sequences are sparse, and the per-step index tensors that all layers share
ops.py         what a device must offer (the interface), with shapes
torch_ops.py   the ops in plain torch: the oracle of every other, and the CPU path without a compiler
native_ops.py  the torch ops with compiled copies: the CPU path
selector.py    page selection, in torch and compiled
native/        the compiled code
backend.py     the SGLang attention backend
"""
