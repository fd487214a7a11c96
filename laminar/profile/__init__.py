"""Measuring a machine: ops, collectives and whole steps timed, and constants fitted to them."""
