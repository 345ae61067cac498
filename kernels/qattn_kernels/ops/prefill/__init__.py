"""Attention of a long call: new tokens see one another as the method's prefill does, and the past as packed."""
