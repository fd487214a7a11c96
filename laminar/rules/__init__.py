"""Which placements an op allows, and how to get from one placement to another."""
