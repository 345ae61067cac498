"""SinkQ's pool: sink tokens that stay outside the packed blocks, in open form."""
