"""FP8 E4M3 with one scale per token: more range within a token than INT8, but coarser steps near its maximum."""
