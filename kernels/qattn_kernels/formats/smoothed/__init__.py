"""Smoothed keys around another format: a row's mean key is subtracted before codes are made, and kept beside them."""
