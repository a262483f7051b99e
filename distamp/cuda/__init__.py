"""The ``torch.cuda.amp`` spellings."""

from distamp.cuda import amp

__all__ = ["amp"]
