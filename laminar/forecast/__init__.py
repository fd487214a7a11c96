"""Predictions: lowering and cost put together, for plans with stages and without."""
