"""NF4 (QLoRA): one scale per block of channels, one code per channel among 16 quantiles of the normal distribution."""
