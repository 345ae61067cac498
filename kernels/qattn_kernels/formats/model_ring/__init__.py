"""Model precision behind a ring: beside a store that closes blocks both sides of a layer have a ring."""
