"""INT8 with one scale a token behind a ring: beside a store that closes blocks both sides of a layer have a ring."""
