"""Smoothed keys around another store: a row's mean key is taken off before codes are made, and kept beside them."""
