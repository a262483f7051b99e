"""The table of torch's collectives: kind, tensors, process group and peer of each op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from distamp.report.tensors import flatten_tensors

__all__ = ["COLLECTIVES", "NOT_TRANSFERS", "Collective", "CollectiveCall", "collective_calls"]

# Kinds in which only the root rank's tensors leave it.
_FROM_ROOT = ("broadcast", "scatter")


class Collective(NamedTuple):
    """A row of the table: the roles of an op's arguments, by their names in its schema.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"send"`` and so on. ``"batch"`` is a list of
            sends and receives.
        input: The argument with the tensors that this rank sends.
        output: The argument with the tensors that the op writes, if it writes one. A schema of
            ``c10d`` does not declare that.
        peer: The argument with the root, destination or source.
    """

    kind: str
    input: str = ""
    output: str = ""
    peer: str = ""


# A line is a namespace, or one of its ops with the fields of `Collective`. The ops of
# c10d_functional have the names of torch 2.2, and call the ops of _c10d_functional.
_TABLE = """\
c10d
    _allgather_base_                   all_gather     input_tensor  output_tensor  -
    _reduce_scatter_base_              reduce_scatter input_tensor  output_tensor  -
    allgather_                         all_gather     input_tensors output_tensors -
    allgather_coalesced_               all_gather     input_list    output_lists   -
    allgather_into_tensor_coalesced_   all_gather     inputs        outputs        -
    allreduce_                         all_reduce     tensors       tensors        -
    allreduce_coalesced_               all_reduce     tensors       tensors        -
    alltoall_                          all_to_all     input_tensors output_tensors -
    alltoall_base_                     all_to_all     input         output         -
    broadcast_                         broadcast      tensors       tensors        root_rank
    gather_                            gather         input_tensors output_tensors root_rank
    gather_into_tensor_                gather         input_tensor  output_tensor  root_rank
    reduce_                            reduce         tensors       tensors        root_rank
    reduce_scatter_                    reduce_scatter input_tensors output_tensors -
    reduce_scatter_tensor_coalesced_   reduce_scatter inputs        outputs        -
    scatter_                           scatter        input_tensors output_tensors root_rank
    send                               send           tensors       -              dst
    recv_                              recv           -             tensors        src
    recv_any_source_                   recv           -             tensors        -
_c10d_functional
    all_gather_into_tensor             all_gather     input         -              -
    all_gather_into_tensor_coalesced   all_gather     inputs        -              -
    all_gather_into_tensor_out         all_gather     input         out            -
    all_reduce                         all_reduce     input         -              -
    all_reduce_                        all_reduce     input         input          -
    all_reduce_coalesced               all_reduce     inputs        -              -
    all_reduce_coalesced_              all_reduce     inputs        inputs         -
    all_to_all_single                  all_to_all     input         -              -
    broadcast                          broadcast      input         -              src
    broadcast_                         broadcast      input         input          src
    reduce_scatter_tensor              reduce_scatter input         -              -
    reduce_scatter_tensor_coalesced    reduce_scatter inputs        -              -
    reduce_scatter_tensor_out          reduce_scatter input         out            -
    isend                              send           tensor        -              dst
    irecv                              recv           -             tensor         src
    batch_p2p_ops                      batch          -             -              -
_c10d_functional_autograd
    all_gather_into_tensor             all_gather     input         -              -
    all_to_all_single                  all_to_all     input         -              -
    reduce_scatter_tensor              reduce_scatter input         -              -
_dtensor
    shard_dim_alltoall                 all_to_all     input         -              -
c10d_functional
    all_gather_into_tensor             all_gather     shard         -              -
    all_gather_into_tensor_coalesced   all_gather     input         -              -
    all_reduce                         all_reduce     self          -              -
    all_reduce_coalesced               all_reduce     self          -              -
    all_to_all_single                  all_to_all     input         -              -
    broadcast                          broadcast      self          -              src
    reduce_scatter_tensor              reduce_scatter input         -              -
    reduce_scatter_tensor_coalesced    reduce_scatter inputs        -              -
    isend                              send           self          -              dst
    irecv                              recv           -             self           src
    batch_p2p_ops                      batch          -             -              -
symm_mem
    _low_contention_all_gather         all_gather     tensor        -              -
    _low_contention_all_gather_ce_multicast     all_gather tensor   -              -
    _low_contention_all_gather_ce_multicast_out all_gather tensor   out            -
    _low_contention_reduce_scatter     reduce_scatter tensor        -              -
    all_to_all_vdev                    all_to_all     input         out            -
    all_to_all_vdev_2d                 all_to_all     input         out            -
    all_to_all_vdev_2d_offset          all_to_all     input         out            -
    fused_all_gather_matmul            all_gather     A             -              -
    fused_all_gather_scaled_matmul     all_gather     A             -              -
    fused_matmul_reduce_scatter        reduce_scatter A             -              -
    fused_scaled_matmul_reduce_scatter reduce_scatter A             -              -
    multi_root_tile_reduce             reduce         in_tiles      out_tile       -
    multimem_all_gather_out            all_gather     input         out            -
    multimem_all_reduce_               all_reduce     input         input          -
    multimem_one_shot_all_reduce       all_reduce     input         -              -
    multimem_one_shot_all_reduce_out   all_reduce     input         out            -
    multimem_one_shot_reduce_out       reduce         input         out            root
    nccl_all_to_all_nd                 all_to_all     input         out            -
    nccl_reduce_scatter_offset         reduce_scatter input         out            -
    nvshmem_all_to_all                 all_to_all     input         out            -
    nvshmem_broadcast                  broadcast      input         input          root
    one_shot_all_reduce                all_reduce     input         -              -
    one_shot_all_reduce_copy           all_reduce     local_input   -              -
    one_shot_all_reduce_copy_out       all_reduce     local_input   out            -
    one_shot_all_reduce_out            all_reduce     input         out            -
    reduce_scatter_out                 reduce_scatter input         output         -
    tile_reduce                        reduce         in_tile       out_tile       root
    two_shot_all_reduce_               all_reduce     input         input          -
    two_shot_all_reduce_out            all_reduce     input         output         -
"""


def _parse_table(text: str) -> dict[str, Collective]:
    """Return the rows of the table by the full names of ops."""
    collectives = {}
    namespace = ""
    for line in text.splitlines():
        words = ["" if word == "-" else word for word in line.split()]
        if not line.startswith(" "):
            namespace = words[0]
            continue
        name, kind, *roles = words
        collectives[f"{namespace}::{name}"] = Collective(kind, *roles)
    return collectives


COLLECTIVES = _parse_table(_TABLE)

# Ops of the same namespaces that send no tensor, or that wait for one. One-sided reads and writes
# are among them, because they have no process group to match two ranks by.
NOT_TRANSFERS = frozenset(
    """
    c10d::barrier c10d::check_for_nan c10d::monitored_barrier_
    _c10d_functional::_wrap_tensor_autograd _c10d_functional::wait_tensor
    _c10d_functional::wait_tensors c10d_functional::wait_tensor
    _dtensor::mesh_get_process_group
    symm_mem::_async_input_mm symm_mem::_barrier symm_mem::_rendezvous
    symm_mem::get_remote_tensors symm_mem::memcpy_to_multicast_ symm_mem::memset32_
    symm_mem::stream_write_value32_
    symm_mem::nccl_get symm_mem::nccl_get_out symm_mem::nccl_put symm_mem::nccl_put_signal
    symm_mem::nccl_put_with_signal symm_mem::nccl_wait_for_signal symm_mem::nccl_wait_signal
    symm_mem::nvshmem_get symm_mem::nvshmem_get_out symm_mem::nvshmem_put
    symm_mem::nvshmem_put_with_signal symm_mem::nvshmem_wait_for_signal
    """.split()  # noqa: SIM905
)


@dataclass(slots=True)
class CollectiveCall:
    """One call of a collective on this rank; for each peer one, if the op is a batch.

    Attributes:
        name: The op without its namespace, such as ``"allreduce_"``.
        kind: As of `Collective`.
        inputs: The tensors that this rank passes.
        outputs: The tensors that the op writes or returns.
        group: The process group; None if torch does not know it.
        peer: The root, destination or source, as a rank of the group.
        tag: The tag of a send or receive.
    """

    name: str
    kind: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    group: dist.ProcessGroup | None
    peer: int | None = None
    tag: int | None = None

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else self.group.rank()

    @property
    def is_sender(self) -> bool:
        """True if the inputs of this rank reach other ranks."""
        if self.kind in _FROM_ROOT:
            return self.peer == self.rank
        return self.kind != "recv"

    @property
    def group_label(self) -> str:
        """The description and the size of the group, such as ``"mesh_tp[2]"``."""
        if self.group is None:
            return ""
        description = self.group.group_desc.replace("default_pg", "all ranks")
        return f"{description}[{self.group.size()}]"

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that all ranks of the call share, up to the number of the call."""
        group = ("", "")
        if self.group is not None:
            group = (self.group.group_name, self.group.group_desc)
        if self.kind == "send":
            return group, self.rank, self.peer, self.tag
        if self.kind == "recv":
            return group, self.peer, self.rank, self.tag
        return group, self.name


def collective_calls(
    name: str, collective: Collective, arguments: Mapping[str, Any]
) -> list[CollectiveCall]:
    """Return the calls that one op stands for, with outputs so far as they are arguments.

    Args:
        name: The op without its namespace.
        collective: Its row of the table.
        arguments: Its arguments by name.
    """
    group = _process_group(arguments)
    if collective.kind == "batch":
        return _batched_calls(group, arguments)
    inputs = flatten_tensors(arguments.get(collective.input))
    outputs = flatten_tensors(arguments.get(collective.output))
    peer = arguments.get(collective.peer)
    tag = arguments.get("tag")
    return [CollectiveCall(name, collective.kind, inputs, outputs, group, peer, tag)]


def _batched_calls(
    group: dist.ProcessGroup | None, arguments: Mapping[str, Any]
) -> list[CollectiveCall]:
    calls = []
    names = ("op_list", "tensors", "peer_list", "tag_list")
    for op, tensor, peer, tag in zip(*(arguments[name] for name in names), strict=True):
        if op == "isend":
            calls.append(CollectiveCall(op, "send", [tensor], [], group, peer, tag))
        else:
            calls.append(CollectiveCall(op, "recv", [], [tensor], group, peer, tag))
    return calls


def _process_group(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group of a collective, which ops take boxed, by name or by ranks."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    name_by_ranks: Any = dist.distributed_c10d._resolve_group_name_by_ranks_and_tag
    name = arguments.get("group_name")
    try:
        if "ranks" in arguments:
            name = name_by_ranks(arguments["ranks"], arguments["tag"])
        if name is not None:
            group: dist.ProcessGroup = resolve(name)
            return group
        boxed: Any = arguments.get("process_group")
        return boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
    except (LookupError, RuntimeError, TypeError, ValueError):
        return None
