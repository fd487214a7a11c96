"""Exact mode: programs of logical ranks, several of which one process computes, with the same bits however hosted."""
