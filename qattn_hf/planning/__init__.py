"""Predict which models a method supports, and which contexts and batches fit, from a config without weights."""
