"""A training job to read and to copy: ``torchrun launch/train.py``."""
