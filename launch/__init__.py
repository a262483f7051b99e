"""A training job that people can read in an hour, and copy: ``torchrun launch/train.py``."""
