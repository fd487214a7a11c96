"""What one op costs on one rank: measured, interpolated, or from the roofline of an assumed machine."""
