"""Gradient communication in fewer bytes: compressed messages, and sums in fp32."""

from distamp.comm_hooks.ddp import (
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from distamp.comm_hooks.formats import COMM_FORMATS, CommFormat, comm_format
from distamp.comm_hooks.fsdp1 import (
    LowPrecisionState,
    fsdp_bf16_compress_hook,
    fsdp_fp16_compress_hook,
)
from distamp.comm_hooks.hook import CommHook
from distamp.comm_hooks.registration import register_comm_hook
from distamp.comm_hooks.stats import HookStats

__all__ = [
    "COMM_FORMATS",
    "CommFormat",
    "CommHook",
    "HookStats",
    "LowPrecisionState",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "comm_format",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "fsdp_bf16_compress_hook",
    "fsdp_fp16_compress_hook",
    "register_comm_hook",
]
