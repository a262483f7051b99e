"""logprob_mismatch: its numbers equal sums written out in Python's float64."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.errors import RankMismatchError
from distamp.report import logprob_mismatch
from tests.collectives import count_collectives
from tests.on_ranks import on_ranks
from tests.ranks import subgroup

Differences = list[list[float]]


class Batch(NamedTuple):
    """Log probabilities by sampler and trainer, with a mask of the tokens that count."""

    sampler: Tensor
    trainer: Tensor
    mask: Tensor


def draw_batch(lengths: list[int], seed: int) -> Batch:
    """Return random log probabilities of sequences with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    sampler = -3 * torch.rand(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    positions = torch.arange(shape[1])
    ends = torch.tensor(lengths)[:, None]
    return Batch(sampler, sampler + 0.3 * noise, positions < ends)


def differences(batch: Batch) -> Differences:
    """Return sampler minus trainer of the tokens that count, by sequence that has any."""
    sequences = []
    difference = batch.sampler.double() - batch.trainer.double()
    for row, mask in zip(difference, batch.mask, strict=True):
        if mask.any():
            sequences.append(row[mask].tolist())
    return sequences


def summarize(values: list[float], low: float, high: float) -> dict[str, float]:
    """Return the statistics of log ratios, which are negative ``values``."""
    n = len(values)
    magnitudes = [abs(value) for value in values]
    ratios = [math.exp(-value) for value in values]
    squares = [ratio**2 for ratio in ratios]
    k3 = 0.0
    clipped = 0
    for ratio in ratios:
        k3 += ratio - 1 - math.log(ratio)
        if ratio < 1 - low or ratio > 1 + high:
            clipped += 1
    return {
        "abs_mean": sum(magnitudes) / n,
        "abs_max": max(magnitudes),
        "k1": sum(values) / n,
        "k3": k3 / n,
        "ess": sum(ratios) ** 2 / (n * sum(squares)),
        "clipped": clipped / n,
    }


def expected_mismatch(
    sequences: Differences, low: float = 0.2, high: float = 0.2
) -> dict[str, float]:
    """Return the result of `logprob_mismatch` for these differences."""
    tokens = []
    totals = []
    for sequence in sequences:
        tokens += sequence
        totals.append(sum(sequence))
    result: dict[str, float] = {}
    result["mismatch/tokens"] = len(tokens)
    result["mismatch/sequences"] = len(totals)
    for name, value in summarize(tokens, low, high).items():
        result[f"mismatch/token_{name}"] = value
    for name, value in summarize(totals, low, high).items():
        result[f"mismatch/sequence_{name}"] = value
    return result


@pytest.mark.parametrize(
    ("clip_range", "low", "high"),
    [(0.2, 0.2, 0.2), ((0.1, 0.28), 0.1, 0.28)],
    ids=["one number for both sides", "two numbers"],
)
def test_the_numbers_are_the_sums_of_float64(clip_range, low, high):
    batch = draw_batch([5, 1, 3, 0, 4], seed=0)
    expected = expected_mismatch(differences(batch), low, high)
    assert 0 < expected["mismatch/token_clipped"] < 1
    mismatch = logprob_mismatch(*batch, clip_range=clip_range)
    assert mismatch == pytest.approx(expected, rel=1e-12)


def test_values_outside_the_mask_do_not_count():
    batch = draw_batch([4, 2], seed=2)
    expected = logprob_mismatch(*batch)
    padding = ~batch.mask
    sampler = batch.sampler.masked_fill(padding, math.nan)
    trainer = batch.trainer.masked_fill(padding, -math.inf)
    assert logprob_mismatch(sampler, trainer, batch.mask) == expected


def test_a_mask_of_integers_and_log_probabilities_with_gradients_are_taken():
    sampler, trainer, mask = draw_batch([4, 2], seed=2)
    expected = logprob_mismatch(sampler, trainer, mask)
    trainer.requires_grad_()
    assert logprob_mismatch(sampler, trainer, mask.long()) == expected


def test_ratios_of_long_sequences_beyond_float64_still_have_a_sample_size():
    trainer = torch.tensor([[900.0], [900.0], [0.0]]).expand(3, 2)
    mismatch = logprob_mismatch(torch.zeros(3, 2), trainer)
    assert mismatch["mismatch/sequence_ess"] == pytest.approx(2 / 3)


def test_without_a_token_means_are_not_numbers():
    sampler, trainer, _ = draw_batch([3], seed=3)
    mismatch = logprob_mismatch(sampler, trainer, torch.zeros(1, 3))
    assert mismatch["mismatch/tokens"] == 0
    assert mismatch["mismatch/sequences"] == 0
    assert math.isnan(mismatch["mismatch/token_abs_mean"])


def test_token_ids_are_refused():
    with pytest.raises(ValueError, match="are these token ids"):
        logprob_mismatch(torch.zeros(1, 2).long(), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (2, 4)], r"\(2, 3\), \(2, 4\)"),
        ([(2, 3), (2, 3), (2,)], r"\(2,\)"),
        ([(3,), (3,)], "one shape"),
    ],
    ids=["trainer of another shape", "mask of another shape", "no dimension of sequences"],
)
def test_wrong_shapes_are_refused(shapes, message):
    tensors = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        logprob_mismatch(*tensors)


def test_a_clip_range_that_is_not_positive_is_refused():
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="positive"):
        logprob_mismatch(zeros, zeros, clip_range=(0.2, 0.0))


# -- over ranks ------------------------------------------------------------------------------------


def draw_batch_of_rank(rank: int) -> Batch:
    """Return the batch of one of two ranks, which have different numbers of sequences."""
    lengths = [5, 1, 3] if rank == 0 else [2, 6]
    return draw_batch(lengths, seed=rank)


@on_ranks(2)
def test_batches_of_all_ranks_count_as_one_after_one_message():
    sequences = differences(draw_batch_of_rank(0)) + differences(draw_batch_of_rank(1))
    batch = draw_batch_of_rank(dist.get_rank())
    with count_collectives() as collectives:
        mismatch = logprob_mismatch(*batch)
    assert mismatch == pytest.approx(expected_mismatch(sequences), rel=1e-12)
    assert collectives.count == 1


@on_ranks(2)
def test_a_rank_without_a_token_takes_part_in_the_one_message():
    batch = draw_batch_of_rank(dist.get_rank())
    if dist.get_rank() == 1:
        batch.mask.zero_()
    expected = expected_mismatch(differences(draw_batch_of_rank(0)))
    with count_collectives() as collectives:
        mismatch = logprob_mismatch(*batch)
    assert mismatch == pytest.approx(expected, rel=1e-12)
    assert collectives.count == 1


@on_ranks(2)
def test_a_mistake_of_one_rank_raises_on_all():
    sampler = torch.zeros(2, 3)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"\(2, 3\), \(2, 4\)"):
            logprob_mismatch(sampler, torch.zeros(2, 4))
    else:
        with pytest.raises(RankMismatchError, match="rank 1"):
            logprob_mismatch(sampler, torch.zeros(2, 3))


@on_ranks(2)
def test_a_process_group_counts_only_the_batches_of_its_ranks():
    rank = dist.get_rank()
    groups = [subgroup([0]), subgroup([1])]
    batch = draw_batch_of_rank(rank)
    mismatch = logprob_mismatch(*batch, process_group=groups[rank])
    expected = expected_mismatch(differences(batch))
    assert mismatch == pytest.approx(expected, rel=1e-12)
