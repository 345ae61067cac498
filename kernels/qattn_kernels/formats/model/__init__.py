"""Model precision: the control beside every packed format."""
