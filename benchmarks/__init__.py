"""Benchmarks of distamp. README.md lists them."""
