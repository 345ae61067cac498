"""How faithful a packed cache is to full precision, without labels: what `qattn compare` and `qattn tune` measure."""
