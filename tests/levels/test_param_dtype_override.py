"""Modules in float32 inside a unit of FSDP2, by ``param_dtype_override_fn`` of torch 2.15."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distamp import initialize
from distamp.errors import ConfigError
from tests.levels.nets import batches, loss_of, net
from tests.on_ranks import on_ranks
from tests.ranks import mesh

FIELDS = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
pytestmark = pytest.mark.skipif(
    "param_dtype_override_fn" not in FIELDS,
    reason=f"torch {torch.__version__} has no param_dtype_override_fn",
)
FP32_NORM = {"norm": "fp32"}


def sharded(level_dtype: torch.dtype, *, batchnorm: bool, keep_norm: bool) -> Any:
    """Return the net as one unit. With ``keep_norm`` the norm keeps its dtype."""
    model: Any = net(batchnorm=batchnorm)
    norm_params = set(model.norm.parameters())

    def override(param: nn.Parameter) -> torch.dtype | None:
        return param.dtype if keep_norm and param in norm_params else None

    policy = MixedPrecisionPolicy(
        level_dtype, output_dtype=torch.float32, param_dtype_override_fn=override
    )
    return fully_shard(model, mesh=mesh((2,), ("shard",)), mp_policy=policy)


def initialized(model: Any, level: str, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return initialize(model, optimizer, level, **settings)


def step_of(amp: Any) -> Any:
    context, following = next(batches(1))
    rank = dist.get_rank()

    def step() -> None:
        amp.zero_grad()
        amp.backward(loss_of(amp.model(context.chunk(2)[rank]), following.chunk(2)[rank]))
        assert amp.step()

    return step


@on_ranks(2)
@pytest.mark.parametrize(
    ("level", "dtype"), [("bf16-O2", torch.bfloat16), ("fp16-O2", torch.float16)]
)
def test_a_norm_that_keeps_float32_needs_no_unit_of_its_own(level, dtype):
    model = sharded(dtype, batchnorm=False, keep_norm=True)
    amp = initialized(model, level, module_precision=FP32_NORM)
    weights: list[torch.dtype] = []
    model.norm.register_forward_pre_hook(lambda norm, args: weights.append(norm.weight.dtype))
    violations = amp.check(step_of(amp))
    assert not violations, str(violations)
    assert set(weights) == {torch.float32}


@on_ranks(2)
def test_a_batch_norm_that_keeps_float32_needs_no_unit_of_its_own():
    model = sharded(torch.bfloat16, batchnorm=True, keep_norm=True)
    amp = initialized(model, "bf16-O2")
    violations = amp.check(step_of(amp))
    assert not violations, str(violations)


@on_ranks(2)
def test_a_batch_norm_that_is_cast_is_refused_with_the_override():
    model = sharded(torch.bfloat16, batchnorm=True, keep_norm=False)
    with pytest.raises(ConfigError, match=r"'norm'.*param_dtype_override_fn"):
        initialized(model, "bf16-O2")
