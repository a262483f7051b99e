"""The ``torch.cpu.amp`` spellings."""

from distamp.cpu import amp

__all__ = ["amp"]
