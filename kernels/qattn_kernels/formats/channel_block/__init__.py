"""What formats share whose tokens have one scale for each block of channels, behind a ring in the model's precision."""
