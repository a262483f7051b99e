"""The meter of two policies, beside sums written out in Python's float64."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distamp.report import mismatch
from tests.collectives import count_collectives
from tests.ranks import RankPool


def expected(rows: list[list[float]], low: float = 0.2, high: float = 0.2) -> dict[str, float]:
    """What `mismatch` should say of these differences, sampler minus trainer, row by row."""
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
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return sampler, trainer, mask


def differences(sampler: Tensor, trainer: Tensor, mask: Tensor) -> list[list[float]]:
    rows = zip(sampler.tolist(), trainer.tolist(), mask.tolist(), strict=True)
    return [[s - t for s, t, kept in zip(*row, strict=True) if kept] for row in rows if any(row[2])]


@pytest.mark.parametrize("clip_range", [0.2, (0.1, 0.28)])
def test_the_numbers_are_those_of_float64_by_hand(clip_range):
    given = drawn([5, 1, 3, 0, 4], seed=0)
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    wanted = expected(differences(*given), low, high)
    assert 0 < wanted["mismatch/token_clipped"] < 1
    assert mismatch(*given, clip_range=clip_range) == pytest.approx(wanted, rel=1e-12)


def test_the_same_policy_has_no_mismatch_and_every_sample_counts():
    sampler, _, mask = drawn([5, 3], seed=1)
    found = mismatch(sampler, sampler, mask)
    counts = {"mismatch/tokens": 8, "mismatch/sequences": 2}
    every = {"mismatch/token_ess": pytest.approx(1), "mismatch/sequence_ess": pytest.approx(1)}
    assert {name: value for name, value in found.items() if value} == counts | every


def test_what_stands_beside_the_mask_does_not_count_and_gradients_stay_out():
    sampler, trainer, mask = drawn([4, 2], seed=2)
    wanted = mismatch(sampler, trainer, mask)
    padded = trainer.masked_fill(~mask, float("-inf")).requires_grad_()
    sampler = sampler.masked_fill(~mask, float("nan"))
    assert mismatch(sampler, padded, mask.long()) == wanted


def test_k1_and_k3_estimate_the_divergence_of_the_two_policies():
    torch.manual_seed(0)
    sampler, trainer = torch.randn(2, 16).log_softmax(1)
    tokens = sampler.exp().multinomial(200_000, replacement=True)[None]
    found = mismatch(sampler[tokens[0]][None], trainer[tokens[0]][None])
    divergence = (sampler.exp() * (sampler - trainer)).sum().item()
    assert found["mismatch/token_k1"] == pytest.approx(divergence, rel=0.02)
    assert found["mismatch/token_k3"] == pytest.approx(divergence, rel=0.02)


def test_ratios_of_long_sequences_that_float64_does_not_hold_still_have_a_sample_size():
    trainer = torch.tensor([[900.0], [900.0], [0.0]]).expand(3, 2)
    found = mismatch(torch.zeros(3, 2), trainer)
    assert found["mismatch/sequence_ess"] == pytest.approx(2 / 3)


def test_without_a_token_means_are_not_numbers():
    found = mismatch(*drawn([3], seed=3)[:2], torch.zeros(1, 3))
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
        mismatch(*given, **settings)


# -- over ranks ------------------------------------------------------------------------------------

LENGTHS = {0: [5, 1, 3], 1: [2, 6]}


def on_rank(empty: int | None = None) -> tuple[dict[str, float], list[str]]:
    """What this rank is told of the sequences of all, and the messages it sent."""
    sampler, trainer, mask = drawn(LENGTHS[dist.get_rank()], seed=dist.get_rank())
    mask &= dist.get_rank() != empty
    with count_collectives() as seen:
        found = mismatch(sampler, trainer, mask)
    return found, [name for name, _ in seen.calls]


@pytest.mark.parametrize("empty", [None, 1])
def test_ranks_with_different_sequences_are_one_batch_in_one_message(ranks2, empty):
    rows = [
        row
        for rank, lengths in LENGTHS.items()
        if rank != empty
        for row in differences(*drawn(lengths, seed=rank))
    ]
    (one, messages), (other, _) = ranks2.run(on_rank, empty)
    assert one == other
    assert one == pytest.approx(expected(rows), rel=1e-12)
    assert len(messages) == 1


def with_a_mistake() -> tuple[str, str]:
    shape = (2, 3) if dist.get_rank() == 0 else (2, 4)
    with pytest.raises(Exception) as found:
        mismatch(torch.zeros(2, 3), torch.zeros(shape))
    return type(found.value).__name__, str(found.value)


def test_a_mistake_of_one_rank_raises_on_all(ranks2):
    (here, text), (there, _) = ranks2.run(with_a_mistake)
    assert (here, there) == ("LockstepError", "ValueError")
    assert "rank 1" in text


def in_a_group_of_its_own() -> Any:
    groups = [dist.new_group([rank]) for rank in range(2)]
    given = drawn(LENGTHS[dist.get_rank()], seed=dist.get_rank())
    found = mismatch(*given, process_group=groups[dist.get_rank()])
    return found, differences(*given)


def test_the_ranks_of_a_group_are_asked_alone(ranks2: RankPool):
    for found, rows in ranks2.run(in_a_group_of_its_own):
        assert found == pytest.approx(expected(rows), rel=1e-12)
