"""Samples of different lengths in one row of tokens: units, masks, attention that stays inside a sample, the loss."""
