"""The table of collectives has every op that torch registers, and reports read it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.tensor
from torch import Tensor, nn

import distamp
from distamp import PrecisionContract
from distamp.report.collectives import COLLECTIVES, NOT_TRANSFERS
from tests.on_ranks import on_ranks

NAMESPACES = {name.partition("::")[0] for name in COLLECTIVES}
SCHEMAS = {
    schema.name: schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.partition("::")[0] in NAMESPACES
}


def test_the_table_knows_every_op_of_the_namespaces_of_collectives():
    """A new op of torch belongs into the table, or into the list of ops that transfer nothing."""
    assert SCHEMAS.keys() - COLLECTIVES.keys() - NOT_TRANSFERS == set()


def test_no_other_namespace_has_an_op_with_a_process_group():
    unknown = set()
    for schema in torch._C._jit_get_all_schemas():
        names = {argument.name for argument in schema.arguments}
        if names & {"process_group", "group_name"} and schema.name not in SCHEMAS:
            unknown.add(schema.name)
    assert unknown == set()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_row_names_arguments_of_the_op(name):
    collective = COLLECTIVES[name]
    if name not in SCHEMAS:
        pytest.skip("this torch has no such op")
    names = {argument.name for argument in SCHEMAS[name].arguments}
    roles = {collective.input, collective.output, collective.peer}
    assert roles - {""} <= names
    assert names & {"process_group", "group_name", "ranks"}


def _not_finite_on_rank_0(x: Tensor) -> Tensor:
    return x.log() if dist.get_rank() == 0 else x


def _send_to_rank_1(x: Tensor) -> Tensor:
    """Send a tensor from rank 0 to rank 1 by functional collectives."""
    ops: Any = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    if dist.get_rank() == 0:
        ops.wait_tensor(ops.isend(x.detach(), 1, 0, group))
        return torch.ones_like(x)
    received = ops.irecv(torch.zeros_like(x), 0, 0, group)
    return ops.wait_tensor(received)


def _batch_to_rank_1(x: Tensor) -> Tensor:
    ops: Any = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    op, peer = ("isend", 1) if dist.get_rank() == 0 else ("irecv", 0)
    (output,) = ops.batch_p2p_ops([op], [peer], [0], [x.detach().clone()], group)
    received = ops.wait_tensor(output)
    return received if dist.get_rank() == 1 else torch.ones_like(x)


@on_ranks(2)
@pytest.mark.skipif(
    not hasattr(torch.ops._c10d_functional, "irecv"),
    reason="torch 2.11 has no functional isend and irecv",
)
@pytest.mark.parametrize(
    "send", [_send_to_rank_1, pytest.param(_batch_to_rank_1, marks=pytest.mark.slow)]
)
def test_a_nan_that_was_received_comes_from_the_op_of_the_sender(send):
    model = nn.Linear(4, 4)

    def step() -> None:
        hidden = model(torch.ones(2, 4))
        message = send(_not_finite_on_rank_0(torch.full((2, 4), -1.0)))
        (hidden * message).sum().backward()

    origin = distamp.find_first_nonfinite(step, model)
    assert origin is not None
    assert (origin.kind, origin.op, origin.ranks) == ("op", "log", (0,))


@on_ranks(2)
def test_a_contract_counts_the_messages_of_dtensor_between_shards():
    group = dist.group.WORLD.group_name

    class Transpose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group)

    model = Transpose()
    report = PrecisionContract(activations="fp32").check(
        lambda: model(torch.ones(2, 4, dtype=torch.bfloat16)), model
    )
    assert report.seen["activations"] == {"bf16": 1}
    (violation,) = report
    assert (violation.op, violation.group) == ("shard_dim_alltoall", "all ranks[2]")
