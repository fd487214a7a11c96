"""The user's optimizer, run on shards: gradients, precision, memory layout, changes between steps."""
