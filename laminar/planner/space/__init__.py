"""What a search is about: what is asked, the cells it is divided into, placements and rewrites that are in it.

Nothing here prices or simulates anything.
"""
