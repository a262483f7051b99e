"""The names and signatures of ``torch.cuda.amp``, with no deprecation warning.

For code written against them; new code says ``distamp.autocast("cuda", ...)``.
"""

from __future__ import annotations

import torch

from distamp.device_amp import amp_of

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

autocast, GradScaler, custom_fwd, custom_bwd = amp_of("cuda", torch.float16, __name__)
