"""What a search is about: what is asked, its cells, presets to be tried, placements and rewrites that are in it.

Nothing here prices or simulates anything.
"""
