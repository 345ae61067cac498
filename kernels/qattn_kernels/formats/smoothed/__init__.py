"""Smoothed keys around another format: a row's mean key is subtracted before quantization and stored separately."""
