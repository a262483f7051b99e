"""logprob_mismatch: the distance between the policy that sampled and the policy that trains."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.errors import RankMismatchError

__all__ = ["LogprobMismatch", "logprob_mismatch"]

# The newer name in torch, which does not warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_MEANS = ("abs_mean", "k1", "k3", "clipped")
# The count, the sums of _MEANS, the largest magnitude, and the logarithms of two sums of ratios.
_STATS_PER_UNIT = 1 + len(_MEANS) + 1 + 2


class LogprobMismatch(dict[str, float]):
    """The result of `logprob_mismatch`, a dict for a logger; ``print`` shows a line a number."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:{width}}  {value:.6g}" for name, value in self.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as JSON types."""
        return dict(self)


def logprob_mismatch(
    sampler_logprobs: Tensor,
    trainer_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    clip_range: float | tuple[float, float] = 0.2,
    process_group: ProcessGroup | None = None,
) -> LogprobMismatch:
    """Measure the distance between the sampling and the training policy, over all ranks.

    Both give log probabilities of the same sampled tokens by the same weights: the sampler (an
    inference engine) when it drew the tokens, the trainer before its first update. With
    d = sampler - trainer and the ratio r = exp(-d) = p_trainer / p_sampler, the result has
    these numbers for tokens (``token_``) and for sequences (``sequence_``). The d of a sequence is
    the sum over its tokens.

    - ``abs_mean`` and ``abs_max``: the mean and the largest magnitude of d;
    - ``k1``: the mean of d, an estimate of KL(sampler, trainer) that may be negative;
    - ``k3``: the mean of r - 1 + d, a steadier estimate of KL that is never negative;
    - ``ess``: the effective sample size of the ratios, sum(r)^2 / (n sum(r^2)), as a share of the
      samples. It is 1 if all ratios are equal;
    - ``clipped``: the share of ratios outside the clip range before any update.

    The result also has the counts ``tokens`` and ``sequences``. Sums are in float64. The call sends
    one message, waits for the device, and returns the same result on every rank. If no rank has a
    token, means are NaN.

    Collective: every rank of `process_group` must call this.

    Args:
        sampler_logprobs: Floating point, (sequences, tokens), padded if lengths differ, for
            example by ``torch.nn.utils.rnn.pad_sequence``.
        trainer_logprobs: The same shape, floating point.
        mask: The same shape, bool or numbers: not 0 at sampled tokens. None: all tokens.
        clip_range: The epsilon of a clipped objective, with the range 1 - epsilon to 1 + epsilon;
            a tuple if the lower and the upper epsilon differ.
        process_group: The ranks that have different sequences: the group of the data mesh if tensor
            or context parallel ranks share sequences. If None, the default group.

    Returns:
        Numbers for a logger, with names that begin with ``mismatch/``.

    Raises:
        ValueError: A shape, dtype or the range is wrong.
        RankMismatchError: Another rank raised a ValueError.

    Source: Schulman, "Approximating KL Divergence" (2020), for k1 and k3; Kong, "A Note on
    Importance Sampling using Standardized Weights" (1992), for the effective sample size.

    Example::

        logger.log(logprob_mismatch(batch["sampled"], batch["trained"], batch["mask"]))
    """
    error = None
    try:
        is_token = _check_inputs(sampler_logprobs, trainer_logprobs, mask)
        low, high = _clip_bounds(clip_range)
        difference = sampler_logprobs.detach().double() - trainer_logprobs.detach().double()
        # Padding outside the mask may have any value, and often has -inf.
        difference = difference.masked_fill(~is_token, 0.0)
        has_token = is_token.any(1)
        of_tokens = difference[is_token]
        of_sequences = difference.sum(1)[has_token]
        stats = torch.cat([_stats(of_tokens, low, high), _stats(of_sequences, low, high)])
    except Exception as raised:
        # The other ranks wait for a message. A count of NaN tells them to raise.
        error = raised
        stats = torch.full((2 * _STATS_PER_UNIT,), torch.nan, dtype=torch.float64)
    gathered = _gather_stats(stats, process_group)
    if error is not None:
        raise error
    failed_ranks = gathered[:, 0].isnan().nonzero().flatten().tolist()
    if failed_ranks:
        raise RankMismatchError(
            f"logprob_mismatch() raised on rank {failed_ranks[0]} of the group, with its own error"
        )
    token_stats, sequence_stats = gathered.split(_STATS_PER_UNIT, 1)
    numbers = _unit_result("token", token_stats) | _unit_result("sequence", sequence_stats)
    return LogprobMismatch(numbers)


def _unit_result(unit: str, stats: Tensor) -> dict[str, float]:
    """Return the numbers of tokens or sequences from the statistics of all ranks."""
    counts, sums, largest, logarithms = stats.split((1, len(_MEANS), 1, 2), dim=1)
    count = counts.sum()
    means = sums.sum(0) / count
    ratios, squared_ratios = logarithms.logsumexp(0)
    effective_samples = (2 * ratios - squared_ratios).exp()
    prefix = f"mismatch/{unit}"
    result = {f"{prefix}s": count.item()}
    for name, mean in zip(_MEANS, means, strict=True):
        result[f"{prefix}_{name}"] = mean.item()
    result[f"{prefix}_abs_max"] = largest.max().item()
    result[f"{prefix}_ess"] = (effective_samples / count).item()
    return result


def _check_inputs(sampler: Tensor, trainer: Tensor, mask: Tensor | None) -> Tensor:
    """Raise for wrong dtypes and shapes; return the mask."""
    if not sampler.is_floating_point() or not trainer.is_floating_point():
        raise ValueError(
            f"log probabilities must be floating point, not {sampler.dtype} and {trainer.dtype}; "
            "are these token ids?"
        )
    if mask is None:
        mask = torch.ones_like(trainer, dtype=torch.bool)
    shapes = sorted({tuple(tensor.shape) for tensor in (sampler, trainer, mask)})
    if sampler.ndim != 2 or len(shapes) > 1:
        text = ", ".join(map(str, shapes))
        raise ValueError(
            f"log probabilities and mask must be of one shape (sequences, tokens), not {text}; "
            "pass those of the sampled tokens alone"
        )
    return mask.bool()


def _clip_bounds(clip_range: float | tuple[float, float]) -> tuple[float, float]:
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    if not (low > 0 and high > 0):
        raise ValueError(f"clip_range must be positive, not {clip_range}; GRPO's is 0.2")
    return 1 - low, 1 + high


def _stats(difference: Tensor, low: float, high: float) -> Tensor:
    """Return the statistics that this rank sends for tokens or for sequences."""
    ratio = (-difference).exp()
    k3 = (-difference).expm1() + difference
    clipped = (ratio < low) | (ratio > high)
    largest = difference.new_zeros(())
    if difference.numel():
        largest = difference.abs().amax()
    stats = [difference.new_tensor(difference.numel())]
    stats += [values.double().sum() for values in (difference.abs(), difference, k3, clipped)]
    stats.append(largest)
    # The ratio of a whole sequence may overflow, but its logarithm does not.
    stats += [(-difference).logsumexp(0), (-2 * difference).logsumexp(0)]
    return torch.stack(stats)


def _gather_stats(stats: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """Return the statistics of every rank, one row each, on the host."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return stats.cpu()[None]
    device = _message_device(stats, process_group)
    world_size = dist.get_world_size(process_group)
    gathered = stats.new_empty(world_size * len(stats), device=device)
    _all_gather(gathered, stats.to(device), process_group)
    return gathered.cpu().view(world_size, len(stats))


def _message_device(stats: Tensor, process_group: ProcessGroup | None) -> str:
    """Return a device type for which the group has a backend, the tensor's if it can be."""
    backends = dist.get_backend_config(process_group)
    accelerator = torch.accelerator.current_accelerator()
    device_types = [stats.device.type, "cpu"]
    if accelerator is not None:
        device_types.append(accelerator.type)
    for device_type in device_types:
        if f"{device_type}:" in backends:
            return device_type
    return stats.device.type
