"""Pipelines: a graph split into stages, their programs, the net of actors and queues, schedules, deadlock check."""
