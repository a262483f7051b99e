"""Layouts whose gradients or parameters are of other kinds than dense float32."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

from tests.place import here
from tests.scaler.layouts import DDP, FSDP2, LAYOUTS, Layout
from tests.scaler.layouts_base import Alone
from tests.scaler.layouts_meshes import MESH_LAYOUTS
from tests.scaler.reference import KINDS, Net

__all__ = ["ALL_LAYOUTS"]


def _policy(param: torch.dtype, reduce: torch.dtype) -> dict[str, MixedPrecisionPolicy]:
    return {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, output_dtype=torch.float32
        )
    }


class FSDP2Float16(FSDP2):
    """Computed and reduced in float16: a sum of finite gradients can overflow on the way."""

    policy = _policy(torch.float16, torch.float16)
    init_scale = 2.0**10
    on_average = True
    tolerance = 2e-4
    norm_tolerance = 5e-3
    overflows_in_sum = True


class FSDP2Float16Compute(FSDP2Float16):
    policy = _policy(torch.float16, torch.float32)
    overflows_in_sum = False


class FSDP2BFloat16(FSDP2):
    policy = _policy(torch.bfloat16, torch.float32)
    on_average = True
    tolerance = 1e-3
    norm_tolerance = 5e-2


class FSDP2BFloat16Float16(FSDP2BFloat16):
    """Computed in bfloat16 and reduced in float16."""

    policy = _policy(torch.bfloat16, torch.float16)
    init_scale = 2.0**10
    overflows_in_sum = True


# torch's fused SGD on CPU leaves most elements of half-precision parameters as they were.
_HALF_SGD = ("SGD for-loop", "SGD foreach")


class _Parameters(Layout):
    """Parameters, gradients and optimizer state in ``dtype``."""

    dtype: ClassVar[torch.dtype]
    on_average = True

    def make_net(self) -> nn.Module:
        return Net(*self.widths).to(self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        return x.to(here(), self.dtype)


class _Float16Parameters(_Parameters):
    dtype = torch.float16
    fp16_grads = "inplace"
    init_scale = 2.0**8
    tolerance = 5e-4
    norm_tolerance = 1e-2
    # Adam's and Adagrad's squares of small gradients are zero in float16, scaler or none.
    kinds = _HALF_SGD


class DDPFloat16Parameters(_Float16Parameters, DDP):
    pass


class FSDP2Float16Parameters(_Float16Parameters, FSDP2):
    pass


class _BFloat16Parameters(_Parameters):
    dtype = torch.bfloat16
    tolerance = 3e-3
    norm_tolerance = 8e-2
    kinds = (*_HALF_SGD, *(name for name in KINDS if not name.startswith("SGD")))


class DDPBFloat16Parameters(_BFloat16Parameters, DDP):
    pass


class FSDP2BFloat16Parameters(_BFloat16Parameters, FSDP2):
    pass


class _TokenNet(Net):
    """The first layer is an embedding of 8 tokens; several inputs of a batch are the same one."""

    def __init__(self, *widths: int, sparse: bool) -> None:
        super().__init__(*widths)
        self.first = nn.Embedding(2**3, 16, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        tokens = ((x[:, :3] > 0).long() * torch.tensor([1, 2, 4], device=x.device)).sum(1)
        x = torch.tanh(self.second(torch.tanh(self.first(tokens))))
        return self.tail(torch.tanh(self.head(x)))


class _Sparse(Layout):
    def make_net(self) -> nn.Module:
        return _TokenNet(*self.widths, sparse=True)

    def forward64(self, parameters: Mapping[str, Tensor], x: Tensor, shard: int) -> Tensor:
        return functional_call(_TokenNet(*self.widths, sparse=False), dict(parameters), (x,))


class AloneSparse(_Sparse, Alone):
    pass


class DDPSparse(_Sparse, DDP):
    pass


ALL_LAYOUTS: dict[str, type[Layout]] = {
    **LAYOUTS,
    **MESH_LAYOUTS,
    "FSDP2 in fp16": FSDP2Float16,
    "FSDP2 in fp16, reduced in fp32": FSDP2Float16Compute,
    "FSDP2 in bf16, reduced in fp32": FSDP2BFloat16,
    "FSDP2 in bf16, reduced in fp16": FSDP2BFloat16Float16,
    "DDP, fp16 parameters": DDPFloat16Parameters,
    "FSDP2, fp16 parameters": FSDP2Float16Parameters,
    "DDP, bf16 parameters": DDPBFloat16Parameters,
    "FSDP2, bf16 parameters": FSDP2BFloat16Parameters,
    "alone, sparse": AloneSparse,
    "DDP, sparse": DDPSparse,
}
