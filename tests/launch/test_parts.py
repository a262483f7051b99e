"""The launcher's other parts, each by itself: schedule, metrics, devices, ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch.config import Config
from launch.device import check_precision
from launch.errors import UsageError
from launch.ranks import Ranks
from launch.reporting import RunReporter, read_metrics
from launch.steps import learning_rate

CPU = torch.device("cpu")


def test_learning_rate_rises_to_the_peak_and_falls_to_its_end():
    config = Config(steps=100, warmup=10, final_lr=0.25)
    rates = [learning_rate(config, taken) for taken in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[55] == pytest.approx((1 + 0.25) / 2)
    assert rates[100] == pytest.approx(0.25)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_line_cut_off_by_a_kill_and_what_came_after_the_checkpoint_are_no_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert read_metrics(path, until=2) == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "missing") == []


def test_metrics_are_json_even_where_a_number_is_not_finite(tmp_path):
    record = {"step": 1, "loss": math.nan, "bits_per_byte": 1.5, "loss_scale": 2.0, "skipped": 0}
    with RunReporter(tmp_path, Config(), "text", [], 0) as report:
        report.step({**record, "gradient_norm": math.inf}, tokens=10)
    [row] = [
        json.loads(line, parse_constant=pytest.fail)
        for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()
    ]
    assert (row["loss"], row["gradient_norm"], row["bits_per_byte"]) == (None, None, 1.5)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_cpu_can_do_every_precision(precision):
    check_precision(CPU, Config(precision=precision))


def test_precision_a_device_cannot_do_is_refused():
    with pytest.raises(UsageError, match="--precision fp16: meta cannot do it"):
        check_precision(torch.device("meta"), Config(precision="fp16"))


def _fault_on(rank: int) -> str:
    ranks = Ranks(rank=dist.get_rank(), local_rank=0, world_size=dist.get_world_size())
    try:
        with ranks.together():
            if ranks.rank >= rank:
                raise UsageError(f"rank {ranks.rank} has no disk")
    except UsageError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("rank", [0, 1])
def test_fault_on_one_rank_stops_all_with_the_first_ones_words(ranks2, rank):
    assert ranks2.run(_fault_on, rank) == [f"rank {rank} has no disk"] * 2


def test_no_fault_stops_nobody(ranks2):
    assert ranks2.run(_fault_on, 2) == ["went on"] * 2


def _sum_and_gather() -> tuple[object, object]:
    ranks = Ranks(rank=dist.get_rank(), local_rank=0, world_size=dist.get_world_size())
    return ranks.sum(1 / 3, float(ranks.rank)), ranks.gather(ranks.rank or None)


def test_values_are_added_in_float64_and_gathered_in_rank_order(ranks2):
    assert ranks2.run(_sum_and_gather) == [((2 / 3, 1.0), [None, 1])] * 2


def test_one_process_needs_no_group():
    alone = Ranks(rank=0, local_rank=0, world_size=1)
    assert alone.gather("x") == ["x"]
    assert alone.sum(2.5) == (2.5,)
