"""A PyTorch model as a graph: traced, functionalised, canonical; what can't be traced is refused or run as it is."""
