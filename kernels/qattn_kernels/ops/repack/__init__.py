"""Repack the blocks of a layer with fewer bits."""
