"""The simulator: tasks on lanes, run event by event; edits simulated again by difference; nets of actors."""
