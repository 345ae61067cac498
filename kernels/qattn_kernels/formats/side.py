"""Compile-time constants of one side of a layer, its keys or its values. `Format.side` fills them."""

from __future__ import annotations

from typing import Any, NamedTuple

PARTS = {2: 4, 3: 4, 4: 2}  # bits per code -> part tiles in the packed bytes of a block; 1 for other widths


class Side(NamedTuple):
    """Compile-time constants of keys or values, called `SIDE` inside kernels.

    Attributes:
        VALUES: true for values.
        D: head dimension.
        DP: `D` rounded up to a power of two.
        INTEGER: tokens are integer codes with a scale; otherwise numbers.
        WIDTHS: bits per code in each run of a head's blocks (`ops.decode.parts.Run`).
        BITS: bits per code in a row's newest blocks if all heads share them; else 0.
        MOST_TILE: maximum blocks that a decode reads at a time.
        CHANNELS: channels of a token that share a scale; 0 if all do.
        GROUP: tokens that share a scale in a decode of keys: see `granularity`.
        STRIDED: packed codes place every eighth token of a block side by side (`KiviFormat.side`).
        CLIP: shrinks the 2-bit range: the outer codes move inward by `CLIP / 16` of half a step.
        COMPENSATES: errors of a token's channels offset each other.
        SMOOTH: a mean is subtracted before quantization.
        LOW: which heads have 2 bits (`formats.traits.Low`). Their number is not a constant, so layers with other heads
            reuse the kernels.
        RANK: criterion that ranks heads, as an index, or -1.
        AGED: a row's first blocks have half the bits of the others.
        ROTATION: the `launch.constants.Rotation` applied in a short call; None if tokens are unrotated or arrive
            rotated.
        EQUALIZED: with a rotation, each channel is also multiplied by a factor.
    """

    VALUES: bool
    D: int
    DP: int
    INTEGER: bool
    WIDTHS: tuple[int, ...] = (0,)
    BITS: int = 0
    MOST_TILE: int = 1
    CHANNELS: int = 0
    GROUP: str = "token"
    STRIDED: bool = False
    CLIP: int = 0
    COMPENSATES: bool = False
    SMOOTH: bool = False
    LOW: int = 0
    RANK: int = -1
    AGED: bool = False
    ROTATION: Any = None
    EQUALIZED: bool = False
