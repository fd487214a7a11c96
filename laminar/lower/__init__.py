"""From a graph and a plan to a program per rank: exchanges, buckets, overlap, recompute, stages, deadlock check."""
