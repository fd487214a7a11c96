"""From torch's traced graph to ours: converted, tidied, and predicted for sizes of batch that nobody traced."""
