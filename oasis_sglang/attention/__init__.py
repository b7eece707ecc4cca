"""Attention over working sets.

page_table.py  which sequences are sparse, and the per-step index tensors that all layers share
ops.py         what a device must offer (the interface), with shapes
torch_ops.py   the ops in plain torch: the CPU path, and the oracle of every other
backend.py     the SGLang attention backend
"""
