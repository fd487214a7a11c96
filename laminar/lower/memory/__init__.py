"""Where activations wait between forward and backward: kept, recomputed as planned or by min cut, offloaded."""
