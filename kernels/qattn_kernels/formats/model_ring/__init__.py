"""Unquantized keys or values with a ring, to pair with a format that packs whole blocks: both sides need a ring."""
