"""Placements of a graph: presets (data, ZeRO, tensor, context), completion at least cost, random plans, folded layers.

What needs no prices of a cluster.
"""
