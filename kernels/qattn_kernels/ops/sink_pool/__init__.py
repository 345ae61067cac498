"""SinkQ's pool: tokens that leave the packed blocks and stay in open form."""
