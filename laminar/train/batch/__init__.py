"""What goes into a step and what comes out: batches taken apart and loaded ahead, losses and metrics."""
