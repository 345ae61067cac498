"""NF4: a scale a block of channels, and one code a channel among 16 quantiles of the normal distribution (QLoRA)."""
