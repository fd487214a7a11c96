"""What ops are: torch's names and ours both ways, kernels, derivatives, and parts of a model that run as one op."""
