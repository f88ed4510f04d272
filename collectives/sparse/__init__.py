"""Reductions of row-sparse and element-sparse gradients: ZEN's schemes, ours, and the baselines, behind one interface.

Elements are rows of width one, so every scheme is written once. Index sets are `touched`, never `non-zero`: a sum that
cancels to zero still arrives, NaN and infinity pass through.
"""
