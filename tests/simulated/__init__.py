"""A simulated accelerator for tests; see README.md."""
