"""Placements of a graph: presets, completion at minimum cost, random plans, repeated layers folded.

What needs no prices of a cluster.
"""
