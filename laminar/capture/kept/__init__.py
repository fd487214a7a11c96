"""Graphs kept from one run of a script to the next, under a digest of all they depend on."""
