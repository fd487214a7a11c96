"""The search itself: best-first branch and bound over cells, and what is built on it.

Batch sizes, clusters of several kinds, what is left of a cluster, requests that nothing fulfils.
"""
