"""fp32 masters: what an optimizer steps in place of a model's fp16 or bf16 parameters."""

from distamp.masters.lookup import master_params, masters_of
from distamp.masters.masters import MasterParameters

__all__ = ["MasterParameters", "master_params", "masters_of"]
