"""The ground floor: moving tensors between ranks, cheaply and exactly.

Holds the transports, the codecs, the sparse schemes, the planner and the places where PyTorch hands us its tensors.
Knows torch, numpy and numba; never Ray, never MLflow. Every reduced result is the same bytes on every rank.
"""
