"""Write new tokens: into the ring or the arena, and close the blocks that are full."""
