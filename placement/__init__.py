"""Decides where things go: memory, GPUs, jobs, experts, checkpoint replicas.

Pure functions on frozen data: state in, decision out, no clock and no I/O. Only `groups.py` touches Ray and only
`traced.py` touches torch.
"""
