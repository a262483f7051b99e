"""fp32 masters: what an optimizer steps in place of a model's fp16 or bf16 parameters."""

from distamp.masters.masters import (
    MasterParameters,
    master_params,
    masters_of,
    refuse_held,
    refuse_share,
)

__all__ = ["MasterParameters", "master_params", "masters_of", "refuse_held", "refuse_share"]
