"""Improvement of a found plan by a Markov chain that proposes and a simulator that decides."""
