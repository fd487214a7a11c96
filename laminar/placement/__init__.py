"""Placements of a graph: presets (data, ZeRO, tensor), completion at minimum cost, random plans, folded layers.

What needs no prices of a cluster.
"""
