"""What a card must prove: `python -m collectives.gpucheck`, one script, a few minutes, one table and one JSON file.

Needs this package, torch, numpy, numba and CuPy; no other room, no network, no data. Parts are independent: one that
fails is reported and the next one runs. On a machine without a card it says so and ends with exit code 3.
"""
