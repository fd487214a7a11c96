"""What goes into a step and comes out: leaves of batches cut into shares and micro-batches, loaded ahead; metrics."""
