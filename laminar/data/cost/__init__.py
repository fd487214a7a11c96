"""What a sample costs: tokens and attention's quadratic part, from a captured graph, corrected by measured times."""
