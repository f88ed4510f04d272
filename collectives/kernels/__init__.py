"""Fused kernels shared by codecs and sparse schemes: numba on CPU tensors, each with a NumPy definition.

`twins.py` holds the NumPy definitions; a kernel and its twin agree bit for bit. Nothing here allocates on behalf of the
network, knows ranks, or checks user input.
"""
