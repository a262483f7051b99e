"""The exchange itself: means beside float64, the same bits everywhere, inf and NaN kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from distamp.comm_hooks import WIRE_FORMATS
from distamp.comm_hooks.layout import DIRECT_BYTES, PIECE
from tests.comm_hooks.training import BOUNDS, agreed, average

EXCHANGED = [name for name in WIRE_FORMATS if name != "fp16_plain"]


def _values(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    tails = torch.exp(0.5 * torch.randn(numel, generator=generator))
    layers = 10.0 ** (2 - torch.arange(numel) // 1000 % 5)
    return values * tails * layers * scale


def _error(numel: int, wire: str, scale: float = 1.0) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([_values(numel, r, scale).double() for r in range(size)])
    mean, _ = average(_values(numel, rank, scale), wire)
    if not agreed(mean):
        return float("inf")
    # Beside the norm of a mean in which nothing cancels.
    return ((mean.double() - everyone.mean(0)).norm() / everyone.norm() * size).item()


def _wrong(lengths: list[int]) -> list[tuple[str, int, float]]:
    found = [(wire, n, _error(n, wire)) for wire in EXCHANGED for n in lengths]
    # Over few elements the errors do not average out.
    return [each for each in found if not each[2] <= BOUNDS[each[0]] * (2 if each[1] < 256 else 1)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_mean_is_near_float64_and_the_same_bits_on_all_ranks(ranks, size):
    lengths = [1, 255, 256 * size, 256 * size + 1, 20_011]
    assert ranks(size).run(_wrong, lengths) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_of_several_pieces_are_averaged(ranks, size):
    assert max(ranks(size).run(_error, 3 * PIECE + 777, "fp16")) <= BOUNDS["fp16"]


@pytest.mark.parametrize("scale", [1e-12, 2.0**24, 1e30])
def test_no_scale_of_gradients_over_or_underflows(ranks4, scale):
    assert max(ranks4.run(_error, 20_011, "fp16", scale)) <= BOUNDS["fp16"]


def test_the_error_does_not_grow_with_the_number_of_ranks(ranks):
    four = max(ranks(4).run(_error, 100_003, "fp16"))
    eight = max(ranks(8).run(_error, 100_003, "fp16"))
    assert eight <= 1.1 * four


def _planted(wire: str, numel: int) -> list[tuple[bool, bool, int]]:
    """For each value in the last place: kept there, finite elsewhere, how often it was flagged."""
    found = []
    for value in (float("inf"), float("-inf"), float("nan")):
        values = torch.ones(numel)
        if dist.get_rank() == dist.get_world_size() - 1:
            values[-1] = value
        mean, state = average(values, wire)
        kept, others = not mean[-1].isfinite(), bool(mean[:-1].isfinite().all())
        found.append((kept, others, state.stats().nonfinite))
    return found


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize("numel", [300, 40_000])
def test_inf_and_nan_of_one_rank_reach_every_rank(ranks4, wire, numel):
    assert ranks4.run(_planted, wire, numel) == [[(True, True, 1)] * 3] * 4


def _near_the_end(numel: int) -> list[tuple[str, bool, int]]:
    found = []
    for wire in EXCHANGED:
        mean, state = average(torch.full((numel,), 3.4e38), wire)
        found.append((wire, bool(mean.isfinite().all()), state.stats().nonfinite))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_mean_is_flagged_just_if_it_is_not_finite(ranks, size):
    for found in ranks(size).run(_near_the_end, 70_000):
        assert all(finite == (not flagged) for _, finite, flagged in found)


# How far below the largest fp32 value means are always finite, as docs/wire.md has it.
FINITE_BELOW = {"bf16": 2e-3, "fp16": 2.5e-4, "int16": 2e-5, "int8": 0.0, "fp8_e4m3": 3.2e-2}


def _finite(numel: int, wire: str) -> tuple[bool, bool]:
    """Whether the mean is finite of values so far below the largest one, and of this one itself."""
    largest = torch.finfo(torch.float32).max
    values = (largest * (1 - FINITE_BELOW[wire]), largest)
    means = [average(torch.full((numel,), value), wire)[0] for value in values]
    return bool(means[0].isfinite().all()), bool(means[1].isfinite().all())


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize(("size", "numel"), [(2, 300), (4, 300), (4, 70_000)])
def test_means_close_to_the_largest_value_are_inf_where_the_docs_say_so(ranks, size, numel, wire):
    assert ranks(size).run(_finite, numel, wire) == [(True, wire == "int8")] * size


def _bytes(numel: int, wire: str) -> tuple[int, int]:
    _, state = average(torch.ones(numel), wire)
    return state.stats().total_bytes, state.stats().bytes_uncompressed


@pytest.mark.parametrize("size", [2, 4, 8])
def test_fp16_sends_half_of_what_an_all_reduce_of_fp32_does(ranks, size):
    for sent, whole in ranks(size).run(_bytes, 1_000_000, "fp16"):
        assert whole == 2 * (size - 1) * 4_000_000 // size
        assert sent <= 0.51 * whole


def test_a_small_bucket_is_sent_at_once(ranks4):
    numel = DIRECT_BYTES // 4 // 4
    assert ranks4.run(_rounds, numel) == [1] * 4
    # To and from each of three others, and a gather.
    assert ranks4.run(_rounds, 8 * numel) == [3 + 3 + 1] * 4
    # One after the other, each with an answer.
    assert ranks4.run(_rounds, 40 * numel) == [2 * (3 + 3) + 1] * 4


def test_two_ranks_send_to_each_other(ranks2):
    assert ranks2.run(_rounds, 40 * DIRECT_BYTES) == [1 + 1] * 2


def _rounds(numel: int) -> int:
    """How many operations of the group an exchange takes."""
    from distamp.comm_hooks.channel import Channel
    from distamp.comm_hooks.engine import Engine
    from distamp.comm_hooks.headers import lockstep_words
    from distamp.comm_hooks.stats import Account
    from distamp.comm_hooks.wire import wire_format
    from tests.collectives import count_collectives

    channel = Channel(dist.group.WORLD, torch.device("cpu"))
    engine = Engine(wire_format("fp16"), channel, Account())
    layout = engine.layout("a tensor", 0, numel, torch.float32)
    words = lockstep_words(0, None, channel.device)
    with count_collectives() as log:
        engine.exchange(torch.ones(numel), layout, words)
    return log.count
