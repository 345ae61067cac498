"""What every launch of a kernel shares: the tensors of a call, compile-time constants, options."""
