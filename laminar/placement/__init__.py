"""Placements of a graph: presets (data, ZeRO, tensor, context), completion at minimum cost, random plans, repeated layers folded.

What needs no prices of a cluster.
"""
