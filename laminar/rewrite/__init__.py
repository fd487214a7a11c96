"""Graphs that compute the same: a language of rewrite rules, the table of them, and their application."""
