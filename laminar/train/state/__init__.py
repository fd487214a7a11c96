"""What a run is: weights, buffers, optimizer state, averages, counters; shards of them, gathered and resharded."""
