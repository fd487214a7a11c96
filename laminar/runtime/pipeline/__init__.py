"""Stages at run time: actors that fire when their inputs are there, their queues, channels and control plane."""
