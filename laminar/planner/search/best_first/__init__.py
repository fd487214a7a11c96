"""Best-first branch and bound over cells, for clusters whose devices are alike.

An incumbent that the searches of all graphs share, one search for each graph, and what they prove.
"""
