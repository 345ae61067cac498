"""INT8 with one scale a token behind a ring: beside a format that closes blocks both sides of a layer have a ring."""
