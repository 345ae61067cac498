"""Remove tokens from a layer, at its end or at its front, and resize its ring."""
