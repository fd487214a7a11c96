"""What one exchange costs: groups on links, formulas of algorithms, measured rows, messages between stages."""
