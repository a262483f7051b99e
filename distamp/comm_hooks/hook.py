"""CommHook: the communication hook of a model, as a user, a scaler and a checkpoint see it."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from distamp.comm_hooks import torch_private
from distamp.comm_hooks.collectives import CommLayout, CompressedCollectives
from distamp.comm_hooks.formats import CommFormat, check_format
from distamp.comm_hooks.residuals import Residual, ResidualStore
from distamp.comm_hooks.stats import HookStats
from distamp.comm_hooks.topology import Topology, gather_topology

__all__ = ["CommHook", "Compression", "real_numel", "shared_hook"]

# Reasons for which gradients or weights are sent uncompressed.
_UNEVEN_HOSTS = "hosts have different numbers of ranks"
_NOT_SMALLER = "too few elements, or too narrow ones, to be fewer bytes in blocks"
_PARTLY_USED = "FSDP2 left out parameters of a module that were not used, and does not report which"


def real_numel(param: Tensor) -> int:
    """Return the numbers of a parameter's gradient in a bucket, two for a complex element."""
    return param.numel() * (2 if param.is_complex() else 1)


class Compression(NamedTuple):
    """The means to send gradients or weights in blocks.

    Attributes:
        collectives: The collectives over the ranks.
        layout: The layout of the blocks, with their format.
        residuals: The rounding errors, if the format has error feedback.
    """

    collectives: CompressedCollectives
    layout: CommLayout
    residuals: Sequence[Residual] = ()


class CommHook(AbstractContextManager["CommHook"]):
    """A hook that averages gradients in a communication format.

    `register_comm_hook` returns one. Unlike the process group that is the state of torch's own
    hooks, it counts the bytes that it sends, and a `DistGradScaler` to which it is attached gives
    it the loss scale and the flags of skipped steps.

    ``copy.deepcopy`` and ``torch.save`` of a DDP module copy the format alone, and warn, because
    torch registers no hook on a copy of a module.

    Args:
        format: The format of gradients in messages: a name of `COMM_FORMATS`, or one of its values.
        process_group: The ranks to average over. None is the default group at the first use.

    Raises:
        ValueError: The format is not one of `COMM_FORMATS`.

    Attributes:
        format: The format of gradients.
        param_format: The format in which FSDP2 gathers weights, or None.
        counts: The counts that `stats` copies.
        residuals: The rounding errors, if the format has error feedback.
        is_copy: Whether this is a copy, which no model calls.
    """

    # Private attributes that survive a call:
    # _group: returns the process group.
    # _collectives: by name of a group and device, the collectives, or None for uneven hosts.
    # _compressions: by format, use, group, device, dtype and lengths, the means to send tensors in
    #   blocks, or the reason to send them uncompressed.

    def __init__(
        self, format: str | CommFormat = "fp16", process_group: ProcessGroup | None = None
    ) -> None:
        self.format = check_format(format)
        self.param_format: CommFormat | None = None
        self.counts = HookStats()
        self.residuals = ResidualStore()
        self.is_copy = False
        self._group: Callable[[], ProcessGroup | None] = torch_private.default_group
        if process_group is not None:
            self._group = weakref.ref(process_group)
        self._collectives: dict[tuple[str, torch.device], CompressedCollectives | None] = {}
        self._compressions: dict[tuple[object, ...], Compression | str] = {}

    def stats(self) -> HookStats:
        """Return the counts of this rank since the hook was made."""
        return copy.deepcopy(self.counts)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks of the average.

        Raises:
            ValueError: torch.distributed is not initialised.
            RuntimeError: The group was destroyed.
        """
        group = self._group()
        try:
            if group is not None and dist.get_rank(group) >= 0:
                return group
        except ValueError:
            # torch has no rank in a group that was destroyed.
            pass
        self.close()
        raise RuntimeError(
            "the process group of this communication hook was destroyed; wrap the model and "
            "register the hook again"
        )

    def close(self) -> None:
        """Wait for messages, and release threads and connections. Ranks may close alone.

        The end of the hook and its model, the first use after the group was destroyed, and the end
        of the interpreter do the same.
        """
        for collectives in self._collectives.values():
            if collectives is not None:
                collectives.transport.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"format": self.format}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CommHook.__init__(self, state["format"])
        self.is_copy = True
        warnings.warn(
            "a copy of a module with a communication hook sends gradients uncompressed, as fp32: "
            "torch registers no hook on copies. If this one is trained, call "
            f'distamp.comm_hooks.register_comm_hook(model, "{self.format.name}") on it',
            stacklevel=2,
        )

    # -- the scaler and checkpoints --------------------------------------------------------------

    def on_scale(self, scale: Tensor) -> None:
        """See `distamp.observers.CommHook.on_scale`."""
        self.residuals.on_scale(scale)

    def on_step(self, parameters: Sequence[Tensor] | None, found_inf: Tensor) -> None:
        """See `distamp.observers.CommHook.on_step`."""
        self.residuals.on_step(parameters, found_inf)

    def on_update(self) -> None:
        """See `distamp.observers.CommHook.on_update`."""
        self.residuals.on_update()

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of parameters in checkpoints, as `register_comm_hook` does."""
        self.residuals.name_parameters(named_parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the rounding errors of this rank's gradients.

        Each rank saves a file, or all ranks save together by ``torch.distributed.checkpoint``.
        ``"residuals"`` has lists of fp32 tensors, by the rank, the number of ranks and hosts, and
        the names of a bucket's parameters. It is empty for formats without error feedback.
        ``"scaled"`` is whether a scaler is attached, so that the errors are in unscaled units.

        Raises:
            RuntimeError: The hook has error feedback, and no names of parameters.
        """
        return self.residuals.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` on this rank, between any two backward passes.

        The errors of a bucket with other parameters are not used. The errors of other ranks, or of
        other numbers of ranks or hosts, are dropped with a warning. If a scaler is attached now and
        was not attached then, they are dropped without one.

        Raises:
            ValueError: This is no such result, or its version is not supported.
        """
        self.residuals.load_state_dict(state_dict)

    def snapshot_state(self) -> Any:
        """See `distamp.observers.SnapshotSource`."""
        return self.residuals.snapshot_state()

    def load_snapshot_state(self, state: Any) -> None:
        """See `distamp.observers.SnapshotSource`."""
        self.residuals.load_snapshot_state(state)

    # -- collectives -----------------------------------------------------------------------------

    def collectives_for(
        self, group: ProcessGroup, device: torch.device, topology: Topology | None = None
    ) -> CompressedCollectives | None:
        """Return the collectives over some ranks, or None if hosts have different numbers of ranks.

        Collective at the first call for a group and device: every rank of ``group`` must call this.

        Args:
            group: The ranks.
            device: The device of the gradients.
            topology: The hosts of the ranks. The first call gathers them if this is None.
        """
        key = group.group_name, device
        if key not in self._collectives:
            if topology is None:
                topology = gather_topology(self.format.name, group)
            self.counts.levels = topology.description
            collectives = None
            if topology.hosts:
                collectives = CompressedCollectives(topology, group, device, self.counts)
                self.residuals.add_topology(collectives.name)
            self._collectives[key] = collectives
        return self._collectives[key]

    def all_reduce_mean(self, values: Tensor, params: Sequence[Tensor] = ()) -> Future[Tensor]:
        """Average a bucket over all ranks of the hook's group, in place, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating.
            params: The parameters of the gradients.

        Raises:
            RuntimeError: A message has failed on this rank, now or before.
        """
        group = self.process_group
        numels: Sequence[int] = ()
        if self.format.needs_error_feedback:
            numels = [real_numel(param) for param in params]
        return self.all_reduce(values, group, float(group.size()), numels, params)

    def all_reduce(
        self,
        values: Tensor,
        group: ProcessGroup,
        divisor: float,
        numels: Sequence[int] = (),
        params: Sequence[Tensor] = (),
    ) -> Future[Tensor]:
        """Replace ``values`` by their sum over a group, divided, while the caller goes on.

        Args:
            values: 1-D, contiguous, floating.
            group: The ranks.
            divisor: The divisor of the sum.
            numels: The length of each parameter. Read if the format has error feedback.
            params: The parameters of the gradients.

        Raises:
            RuntimeError: A message has failed on this rank, now or before.
        """
        if group.size() == 1 or values.numel() == 0:
            return torch_private.completed_future(values.copy_(values / divisor))
        compression = self.prepare("buckets", group, values, values.numel(), numels, params)
        if isinstance(compression, str):
            return self.all_reduce_uncompressed(values, group, divisor, compression)
        return compression.collectives.all_reduce_mean(
            values, compression.layout, divisor, compression.residuals
        )

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        group: ProcessGroup,
        divisor: float,
        numels: Sequence[int] = (),
        params: Sequence[Tensor] = (),
    ) -> None:
        """Write this rank's shard of the sum of ``input`` over a group, divided, to ``output``.

        Args:
            output: 1-D, contiguous, floating.
            input: 1-D, contiguous, floating: a shard for each rank.
            group: The ranks.
            divisor: The divisor of the sum.
            numels: The length of each parameter in a shard. Read if the format has error feedback.
            params: The parameters of the gradients.

        Raises:
            RuntimeError: A message has failed on this rank, now or before.
        """
        if group.size() == 1 or input.numel() == 0:
            output.copy_(input / divisor)
            return
        compression = self.prepare("shards", group, input, output.numel(), numels, params)
        if isinstance(compression, str):
            self._reduce_scatter_uncompressed(output, input, group, divisor, compression)
            return
        compression.collectives.reduce_scatter_mean(
            output, input, compression.layout, divisor, compression.residuals
        )

    def prepare(
        self,
        usage: str,
        group: ProcessGroup,
        values: Tensor,
        numel: int,
        numels: Sequence[int],
        params: Sequence[Tensor],
    ) -> Compression | str:
        """Return the means to send gradients in blocks, or the reason to send them uncompressed.

        Args:
            usage: "buckets" or "shards".
            group: The ranks.
            values: A tensor with the dtype and device of the gradients.
            numel: The length of the bucket, or of one shard.
            numels: The length of each parameter in it. Read if the format has error feedback.
            params: The parameters.
        """
        if not self.format.needs_error_feedback:
            # A block's scale may serve several parameters.
            return self.compression_for(usage, self.format, group, values, [numel])
        # FSDP2 reduces the gradients of the parameters that were used, without their names.
        if sum(numels) != numel:
            return _PARTLY_USED
        compression = self.compression_for(usage, self.format, group, values, numels)
        if isinstance(compression, str):
            return compression
        collectives, layout, _ = compression
        bucket_usage = f"{collectives.name}, {usage}"
        residuals = self.residuals.get(bucket_usage, params, layout.residual_numels, values.device)
        return Compression(collectives, layout, residuals)

    def compression_for(
        self,
        usage: str,
        format: CommFormat,
        group: ProcessGroup,
        values: Tensor,
        numels: Sequence[int],
    ) -> Compression | str:
        """Return the means to send tensors in blocks, or the reason to send them uncompressed.

        The next call with the same arguments returns the same object.

        Args:
            usage: "buckets", "shards" or "weights".
            format: The format.
            group: The ranks.
            values: A tensor of the dtype and device.
            numels: The lengths of the parameters, each of which begins a block.
        """
        key = usage, format.name, group.group_name, values.device, values.dtype, *numels
        if key not in self._compressions:
            self._compressions[key] = self._choose_compression(usage, format, group, values, numels)
        return self._compressions[key]

    def _choose_compression(
        self,
        usage: str,
        format: CommFormat,
        group: ProcessGroup,
        values: Tensor,
        numels: Sequence[int],
    ) -> Compression | str:
        if not (format.is_compressed and format.fits(values.dtype)):
            return f"{values.dtype} is no wider than {format.name}".removeprefix("torch.")
        collectives = self.collectives_for(group, values.device)
        if collectives is None:
            return _UNEVEN_HOSTS
        layout = collectives.make_layout(usage, format, numels, values.itemsize)
        if layout is None:
            return _NOT_SMALLER
        return Compression(collectives, layout)

    def all_reduce_uncompressed(
        self, values: Tensor, group: ProcessGroup, divisor: float, reason: str
    ) -> Future[Tensor]:
        """All-reduce by torch, and count the reason."""
        self._count_uncompressed(reason)
        values.div_(divisor)
        work = dist.all_reduce(values, group=group, async_op=True)
        result: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return result

    def _reduce_scatter_uncompressed(
        self, output: Tensor, input: Tensor, group: ProcessGroup, divisor: float, reason: str
    ) -> None:
        self._count_uncompressed(reason)
        input.div_(divisor)
        total = output if output.dtype is input.dtype else output.to(input.dtype)
        torch_private.reduce_scatter_single(total, input, group=group)
        output.copy_(total)

    def _count_uncompressed(self, reason: str) -> None:
        self.counts.fallbacks[f"gradients reduced uncompressed: {reason}"] += 1


# The hooks of drop-in functions, which get a process group or None as torch's do.
_shared_hooks: weakref.WeakKeyDictionary[ProcessGroup, dict[str, CommHook]] = (
    weakref.WeakKeyDictionary()
)


def shared_hook(state: CommHook | ProcessGroup | None, format: str) -> CommHook:
    """Return ``state`` if it is a hook, or the hook that drop-ins share for a group and a format.

    Raises:
        TypeError: ``state`` is something else.
    """
    if isinstance(state, CommHook):
        return state
    group = torch_private.default_group() if state is None else state
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            "the state of a communication hook must be a ProcessGroup, None (the default group) or "
            f"what distamp.comm_hooks.register_comm_hook returned, not {type(state).__name__}"
        )
    hooks = _shared_hooks.setdefault(group, {})
    if format not in hooks:
        hooks[format] = CommHook(format, group)
    return hooks[format]
