"""Jobs: the step, the user's optimizer on shards, precision, guards, checkpoints, the loop."""
