"""The names and signatures of ``torch.cpu.amp``, with no deprecation warning.

For code written against them; new code says ``distamp.autocast("cpu", ...)``.
"""

from __future__ import annotations

import torch

from distamp.device_amp import amp_of

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

autocast, GradScaler, custom_fwd, custom_bwd = amp_of("cpu", torch.bfloat16, __name__)
