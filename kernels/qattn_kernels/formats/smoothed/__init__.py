"""Smoothed keys around another format: a row's mean key is taken off before codes are made, and kept beside them."""
