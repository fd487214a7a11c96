"""Exchanges in a program: lines of boxing, small ones merged to buckets, started early and awaited late."""
