"""Layouts whose gradients or parameters are of other kinds than dense float32."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

from tests.place import here
from tests.scaler.layouts import DDP, FSDP2, LAYOUTS, Layout
from tests.scaler.layouts_base import Alone
from tests.scaler.layouts_meshes import MESH_LAYOUTS
from tests.scaler.reference import KINDS, Net

__all__ = ["ALL_LAYOUTS", "Parameters"]

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def _policy(param: torch.dtype, reduce: torch.dtype) -> dict[str, MixedPrecisionPolicy]:
    return {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduce, output_dtype=torch.float32
        )
    }


def _with(base: type[Layout], **settings: Any) -> type[Layout]:
    return type(base.__name__, (base,), settings)


# Computed and reduced in these dtypes. A sum of finite gradients can overflow in float16.
_FLOAT16 = {"init_scale": 2.0**10, "on_average": True, "tolerance": 2e-4, "norm_tolerance": 5e-3}
_BFLOAT16 = {"on_average": True, "tolerance": 1e-3, "norm_tolerance": 5e-2}
# torch's fused SGD on CPU leaves most elements of half-precision parameters as they were.
_HALF_SGD = ("SGD for-loop", "SGD foreach")


class Parameters(Layout):
    """Parameters, gradients and optimizer state in ``dtype``."""

    dtype: ClassVar[torch.dtype] = F16
    on_average = True

    def make_net(self) -> nn.Module:
        return super().make_net().to(self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        return x.to(here(), self.dtype)


class DDPParameters(Parameters, DDP):
    pass


class FSDP2Parameters(Parameters, FSDP2):
    pass


_FLOAT16_PARAMETERS: dict[str, Any] = {
    "fp16_grads": "inplace",
    "init_scale": 2.0**8,
    "tolerance": 5e-4,
    "norm_tolerance": 1e-2,
    # Adam's and Adagrad's squares of small gradients are zero in float16, scaler or none.
    "kinds": _HALF_SGD,
}
_BFLOAT16_PARAMETERS: dict[str, Any] = {
    "dtype": BF16,
    "tolerance": 3e-3,
    "norm_tolerance": 8e-2,
    "kinds": (*_HALF_SGD, *(name for name in KINDS if not name.startswith("SGD"))),
}


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
    "FSDP2 in fp16": _with(FSDP2, **_FLOAT16, policy=_policy(F16, F16), overflows_in_sum=True),
    "FSDP2 in fp16, reduced in fp32": _with(FSDP2, **_FLOAT16, policy=_policy(F16, F32)),
    "FSDP2 in bf16, reduced in fp32": _with(FSDP2, **_BFLOAT16, policy=_policy(BF16, F32)),
    "FSDP2 in bf16, reduced in fp16": _with(
        FSDP2, **_BFLOAT16, policy=_policy(BF16, F16), init_scale=2.0**10, overflows_in_sum=True
    ),
    "DDP, fp16 parameters": _with(DDPParameters, **_FLOAT16_PARAMETERS),
    "FSDP2, fp16 parameters": _with(FSDP2Parameters, **_FLOAT16_PARAMETERS),
    "DDP, bf16 parameters": _with(DDPParameters, **_BFLOAT16_PARAMETERS),
    "FSDP2, bf16 parameters": _with(FSDP2Parameters, **_BFLOAT16_PARAMETERS),
    "alone, sparse": AloneSparse,
    "DDP, sparse": DDPSparse,
}
