"""What kernels are compiled for of one side of a layer, its keys or its values: filled by `Format.side`."""

from __future__ import annotations

from typing import Any, NamedTuple

PARTS = {2: 4, 3: 4, 4: 2}  # part tiles in the packed bytes of a block, by the bits of a code; else one


class Side(NamedTuple):
    """Compile-time constants of keys or of values; `SIDE` inside kernels.

    Attributes:
        VALUES: they are values.
        D: head dim. DP: the power of two that holds it.
        INTEGER: tokens have integer codes with a scale, else numbers.
        WIDTHS: bits of the codes in the runs that a head's blocks may have (`ops.decode.parts.Run`).
        BITS: of a code where all heads have as many, in a row's newest blocks; else 0.
        MOST_TILE: blocks that a decode may read at a time.
        CHANNELS: of a token that share a scale, in formats where not all do, else 0.
        GROUP: which tokens share a scale in a decode of keys: see `granularity`.
        STRIDED: every eighth token of a block stands side by side in packed codes (`KiviFormat.side`).
        CLIP: sixteenths of half a step by which the outer codes of 2 bits lie inside of their range.
        COMPENSATES: errors of a token's channels make up for one another.
        SMOOTH: codes are made around a mean.
        LOW: which heads have 2 bits (`formats.mixed_heads.Low`); how many is no constant, so that layers with other
            heads need no kernels of their own. RANK: by what heads are ranked, an index that kernels know, else -1.
        AGED: a row's first blocks have half the bits of the others.
        ROTATION: the `launch.constants.Rotation` in a short call, None where tokens are not rotated, or were before.
        EQUALIZED: where they are rotated so, each channel is multiplied by a factor.
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
