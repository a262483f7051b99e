"""Measurements beside peers; each script says how to run it."""
