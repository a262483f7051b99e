"""How far the policy that sampled is from the policy that trains, by their log probabilities."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from distamp.errors import RankMismatchError

__all__ = ["logprob_mismatch"]

# By torch's newer name where there is, which does not warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Of tokens, and again of sequences: how many, sums, the largest, sums of ratios as logarithms.
_SUMS = ("abs_mean", "k1", "k3", "clipped")
_SENT = 1 + len(_SUMS) + 3


def logprob_mismatch(
    sampler_logprobs: Tensor,
    trainer_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    clip_range: float | tuple[float, float] = 0.2,
    process_group: ProcessGroup | None = None,
) -> dict[str, float]:
    """Measure how far the policy that sampled is from the one that trains, over all ranks.

    Both give log probabilities of the same sampled tokens by the same weights: the sampler (an
    inference engine) as it drew them, the trainer as it computes them before its first update.
    With d = sampler - trainer and the ratio r = exp(-d) = p_trainer / p_sampler, each of these is
    there for tokens (``token_``) and for sequences (``sequence_``), whose d is their tokens' sum:

    - ``abs_mean`` and ``abs_max``: the mean and the largest magnitude of d;
    - ``k1``: the mean of d, an estimate of KL(sampler, trainer) that may be negative;
    - ``k3``: the mean of r - 1 + d, an estimate of the same that is steadier and never negative;
    - ``ess``: the effective sample size of the ratios, sum(r)^2 / (n sum(r^2)), as a share: 1 if
      all are equal, and what is left of the samples where they are weighted by the ratios;
    - ``clipped``: the share whose ratio is outside the clip range before anything was learnt.

    Beside them are the counts ``tokens`` and ``sequences``. Sums are in float64. Every rank of the
    group calls this, sends one message, waits for the device, and gets the same result. Where no
    rank has a token, means are NaN.

    Args:
        sampler_logprobs: Floating point, (sequences, tokens); padded where lengths differ, as by
            ``torch.nn.utils.rnn.pad_sequence``.
        trainer_logprobs: The same shape, floating point.
        mask: The same shape, bool or numbers: not 0 where a token was sampled. None: everywhere.
        clip_range: The epsilon of a clipped objective, whose range is 1 - epsilon to 1 + epsilon;
            two of them where the lower and the upper one differ.
        process_group: The ranks that have different sequences: of the data mesh, where tensor or
            context parallel ranks share some. None is the default group, if there is one.

    Returns:
        Numbers, as a logger takes them; each name begins with ``mismatch/``.

    Raises:
        ValueError: Shapes or dtypes are not those, or the range is not positive.
        RankMismatchError: Another rank raised one of these.

    Source: Schulman, "Approximating KL Divergence" (2020), for k1 and k3; Kong, "A Note on
    Importance Sampling using Standardized Weights" (1992), for the effective sample size.

    Example::

        logger.log(logprob_mismatch(batch["sampled"], batch["trained"], batch["mask"]))
    """
    error = None
    try:
        sent = _sums(*_checked(sampler_logprobs, trainer_logprobs, mask), *_ends(clip_range))
    except Exception as found:
        # The other ranks wait for a message; a count of NaN tells them.
        error, sent = found, torch.full((2 * _SENT,), torch.nan, dtype=torch.float64)
    everyone = _gathered(sent, process_group)
    if error is not None:
        raise error
    bad = everyone[:, 0].isnan().nonzero().flatten().tolist()
    if bad:
        raise RankMismatchError(
            f"logprob_mismatch() raised on rank {bad[0]} of the group, with its own error"
        )
    result = {}
    for unit, part in zip(("token", "sequence"), everyone.split(_SENT, 1), strict=True):
        count, sums = part[:, 0].sum(), part[:, 1 : 1 + len(_SUMS)].sum(0)
        ratios, squares = part[:, -2:].logsumexp(0)
        means = dict(zip(_SUMS, sums / count, strict=True))
        means |= {"abs_max": part[:, -3].amax(), "ess": (2 * ratios - squares).exp() / count}
        result[f"mismatch/{unit}s"] = count.item()
        result |= {f"mismatch/{unit}_{name}": value.item() for name, value in means.items()}
    return result


def _checked(sampler: Tensor, trainer: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the differences in float64, 0 outside the mask, and the mask."""
    if not sampler.is_floating_point() or not trainer.is_floating_point():
        raise ValueError(
            f"log probabilities must be floating point, not {sampler.dtype} and {trainer.dtype}; "
            "are these token ids?"
        )
    shapes = [tuple(each.shape) for each in (sampler, trainer, mask) if each is not None]
    if sampler.ndim != 2 or len(set(shapes)) > 1:
        raise ValueError(
            f"log probabilities and mask must be of one shape (sequences, tokens), not "
            f"{', '.join(map(str, shapes))}; pass those of the sampled tokens alone"
        )
    where = torch.ones_like(trainer, dtype=torch.bool) if mask is None else mask.bool()
    difference = sampler.detach().double() - trainer.detach().double()
    # What stands beside the mask may be anything: padding is often -inf.
    return difference.masked_fill(~where, 0.0), where


def _ends(clip_range: float | tuple[float, float]) -> tuple[float, float]:
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    if not (low > 0 and high > 0):
        raise ValueError(f"clip_range must be positive, not {clip_range}; GRPO's is 0.2")
    return 1 - low, 1 + high


def _sums(difference: Tensor, where: Tensor, low: float, high: float) -> Tensor:
    """Return what this rank sends, of its tokens and of its sequences."""
    sent = []
    for d in (difference[where], difference.sum(1)[where.any(1)]):
        ratio = (-d).exp()
        k3 = (-d).expm1() + d
        clipped = (ratio < low) | (ratio > high)
        sums = [each.double().sum() for each in (d.abs(), d, k3, clipped)]
        largest = d.abs().amax() if d.numel() else d.new_zeros(())
        # Ratios of whole sequences may overflow, their logarithms do not.
        logarithms = [(-d).logsumexp(0), (-2 * d).logsumexp(0)]
        sent += [d.new_tensor(d.numel()), *sums, largest, *logarithms]
    return torch.stack(sent)


def _gathered(sent: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """Return what every rank sent, (ranks, sent), on the host."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return sent.cpu()[None]
    backends = dist.get_backend_config(process_group)
    accelerator = torch.accelerator.current_accelerator()
    kinds = [sent.device.type, "cpu", *([accelerator.type] if accelerator is not None else [])]
    device = next((kind for kind in kinds if f"{kind}:" in backends), sent.device)
    everyone = sent.new_empty(dist.get_world_size(process_group) * len(sent), device=device)
    _all_gather(everyone, sent.to(device), process_group)
    return everyone.cpu().view(-1, len(sent))
