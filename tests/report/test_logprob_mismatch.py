"""The meter of two policies, beside sums written out in Python's float64."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.errors import RankMismatchError
from distamp.report import logprob_mismatch
from tests.collectives import count_collectives
from tests.on_ranks import on_ranks
from tests.ranks import subgroup


def expected(rows: list[list[float]], low: float = 0.2, high: float = 0.2) -> dict[str, float]:
    """Return the result of `logprob_mismatch` for differences, sampler minus trainer, by row."""
    result = {}
    units = {"token": [d for row in rows for d in row], "sequence": [sum(row) for row in rows]}
    for unit, differences in units.items():
        n, ratios = len(differences), [math.exp(-d) for d in differences]
        result |= {
            f"mismatch/{unit}s": n,
            f"mismatch/{unit}_abs_mean": sum(map(abs, differences)) / n,
            f"mismatch/{unit}_abs_max": max(map(abs, differences)),
            f"mismatch/{unit}_k1": sum(differences) / n,
            f"mismatch/{unit}_k3": sum(r - 1 - math.log(r) for r in ratios) / n,
            f"mismatch/{unit}_ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
            f"mismatch/{unit}_clipped": sum(not 1 - low <= r <= 1 + high for r in ratios) / n,
        }
    return result


def drawn(lengths: list[int], seed: int, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of both, and the mask, of sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    sampler = -torch.rand(shape, generator=generator) * 3
    trainer = sampler + spread * torch.randn(shape, generator=generator)
    return sampler, trainer, torch.arange(shape[1]) < torch.tensor(lengths)[:, None]


def differences(sampler: Tensor, trainer: Tensor, mask: Tensor) -> list[list[float]]:
    rows = zip(sampler.tolist(), trainer.tolist(), mask.tolist(), strict=True)
    return [[s - t for s, t, kept in zip(*row, strict=True) if kept] for row in rows if any(row[2])]


@pytest.mark.parametrize("clip_range", [0.2, (0.1, 0.28)])
def test_the_numbers_are_those_of_float64_by_hand(clip_range):
    given = drawn([5, 1, 3, 0, 4], seed=0)
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    wanted = expected(differences(*given), low, high)
    assert 0 < wanted["mismatch/token_clipped"] < 1
    assert logprob_mismatch(*given, clip_range=clip_range) == pytest.approx(wanted, rel=1e-12)


def test_what_stands_beside_the_mask_does_not_count_and_gradients_stay_out():
    sampler, trainer, mask = drawn([4, 2], seed=2)
    wanted = logprob_mismatch(sampler, trainer, mask)
    padded = trainer.masked_fill(~mask, float("-inf")).requires_grad_()
    sampler = sampler.masked_fill(~mask, float("nan"))
    assert logprob_mismatch(sampler, padded, mask.long()) == wanted


def test_ratios_of_long_sequences_that_float64_does_not_hold_still_have_a_sample_size():
    trainer = torch.tensor([[900.0], [900.0], [0.0]]).expand(3, 2)
    found = logprob_mismatch(torch.zeros(3, 2), trainer)
    assert found["mismatch/sequence_ess"] == pytest.approx(2 / 3)


def test_without_a_token_means_are_not_numbers():
    found = logprob_mismatch(*drawn([3], seed=3)[:2], torch.zeros(1, 3))
    assert found["mismatch/tokens"] == found["mismatch/sequences"] == 0
    assert math.isnan(found["mismatch/token_abs_mean"])


WRONG = {
    "token ids": ((torch.zeros(1, 2).long(), torch.zeros(1, 2)), {}, "are these token ids"),
    "shapes": ((torch.zeros(2, 3), torch.zeros(2, 4)), {}, r"\(2, 3\), \(2, 4\)"),
    "mask": ((torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2)), {}, r"\(2,\)"),
    "flat": ((torch.zeros(3), torch.zeros(3)), {}, "one shape"),
    "range": ((torch.zeros(1, 1), torch.zeros(1, 1)), {"clip_range": (0.2, 0.0)}, "positive"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_measured_is_refused(name):
    given, settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        logprob_mismatch(*given, **settings)


# -- over ranks ------------------------------------------------------------------------------------

LENGTHS = {0: [5, 1, 3], 1: [2, 6]}


@on_ranks(2)
@pytest.mark.parametrize("empty", [None, 1])
def test_ranks_with_different_sequences_are_one_batch_in_one_message(empty):
    rows = [
        row
        for rank, lengths in LENGTHS.items()
        if rank != empty
        for row in differences(*drawn(lengths, seed=rank))
    ]
    sampler, trainer, mask = drawn(LENGTHS[dist.get_rank()], seed=dist.get_rank())
    with count_collectives() as seen:
        found = logprob_mismatch(sampler, trainer, mask & (dist.get_rank() != empty))
    assert (found, seen.count) == (pytest.approx(expected(rows), rel=1e-12), 1)


@on_ranks(2)
def test_a_mistake_of_one_rank_raises_on_all():
    wrong = dist.get_rank() == 1
    error, says = (ValueError, r"\(2, 3\), \(2, 4\)") if wrong else (RankMismatchError, "rank 1")
    with pytest.raises(error, match=says):
        logprob_mismatch(torch.zeros(2, 3), torch.zeros(2, 3 + wrong))


@on_ranks(2)
def test_the_ranks_of_a_group_are_asked_alone():
    rank = dist.get_rank()
    groups, given = [subgroup([rank]) for rank in range(2)], drawn(LENGTHS[rank], seed=rank)
    found = logprob_mismatch(*given, process_group=groups[rank])
    assert found == pytest.approx(expected(differences(*given)), rel=1e-12)
