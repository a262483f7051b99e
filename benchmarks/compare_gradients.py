"""The time of compare_gradients, against the step that it checks and against both steps.

    OMP_NUM_THREADS=1 python -m benchmarks.compare_gradients [--rounds 15] [--layers 4]
        [--d-model 128]

Two gloo ranks train the launcher's GPT under FSDP2. The reference step computes the batches of both
ranks on one of them. "both steps" is the plain step, and then the reference step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.common import (
    format_median,
    format_ratio,
    interleave,
    print_table,
    run_command,
    slowest_times,
)
from distamp.report import compare_gradients
from launch.config import Config
from launch.model import GPT
from tests.ranks import RankPool, mesh

RANKS, VOCABULARY = 2, 256
PLAIN, BOTH, CALL = "plain step", "both steps", "compare_gradients"


def make_model(layers: int, d_model: int) -> Any:
    """Return the launcher's GPT without dropout."""
    torch.manual_seed(0)
    config = Config(layers=layers, d_model=d_model, dropout=0.0)
    return GPT(config, VOCABULARY).train()


def run_rank(rounds: int, layers: int, d_model: int) -> dict[str, list[float]]:
    """Time the three contenders on this rank."""
    reference = make_model(layers, d_model)
    model = make_model(layers, d_model)
    device_mesh = mesh((RANKS,), ("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    length = Config().seq_len
    tokens = torch.randint(VOCABULARY, (4 * RANKS, length + 1))
    local_tokens = tokens.chunk(RANKS)[dist.get_rank()]

    def run(net: Any, batch: torch.Tensor) -> None:
        logits = net(batch[:, :-1])
        targets = batch[:, 1:].flatten()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()

    def plain_step() -> None:
        run(model, local_tokens)

    def reference_step() -> None:
        run(reference, tokens)

    def both_steps() -> None:
        plain_step()
        if dist.get_rank() == 0:
            reference_step()
        dist.barrier()

    def compare() -> None:
        comparison = compare_gradients(plain_step, model, reference_step, reference)
        assert comparison.matches, comparison

    def prepare() -> None:
        for net in (model, reference):
            net.zero_grad(set_to_none=True)
        dist.barrier()

    contenders = {PLAIN: plain_step, BOTH: both_steps, CALL: compare}
    return interleave(contenders, rounds, setup=prepare)


def main(rounds: int = 15, layers: int = 4, d_model: int = 128) -> None:
    """Print the times and their ratios.

    Args:
        rounds: Timed rounds.
        layers: Layers of the GPT.
        d_model: Its width.
    """
    with RankPool(RANKS, timeout=900) as pool:
        times = slowest_times(pool.run(run_rank, rounds, layers, d_model))
    rows = []
    for name in (PLAIN, BOTH, CALL):
        ratios = [format_ratio(times[name], times[peer]) for peer in (PLAIN, BOTH)]
        rows.append([name, format_median(times[name]), *ratios])
    print_table(["", "ms", "of the plain step", "of both steps"], rows)


if __name__ == "__main__":
    run_command(main)
