"""Master parameters: float32 copies that an optimizer steps instead of fp16 or bf16 parameters."""

from distamp.masters.master_parameters import MasterParameters, master_params, masters_of

__all__ = ["MasterParameters", "master_params", "masters_of"]
