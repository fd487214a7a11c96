"""Lower bounds: no plan of a cell is simulated faster than these."""
