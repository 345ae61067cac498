"""INT8 with one scale per token and a ring, to pair with a format that packs whole blocks: both sides need a ring."""
