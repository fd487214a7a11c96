"""Decisions: plans with stages and without, what they say about themselves, and who answers questions about them."""
