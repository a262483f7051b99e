"""The time of a step under a report, a contract and a search for non-finite numbers.

    OMP_NUM_THREADS=1 python -m benchmarks.traced_step [--rounds 15]

The model is the launcher's GPT, and a step is one batch with AdamW. Times are
processor time, and each ratio is to a plain step of the same round, with its quartiles. A search
runs the forward and backward passes two to four times.
"""

import time
from collections.abc import Callable

import torch

import distamp
from benchmarks.common import format_median, format_ratio, interleave, print_table, run_command
from launch.config import Config
from launch.model import GPT

VOCABULARY = 256
CONTRACT = distamp.PrecisionContract(compute=("bf16", "fp32"), master_weights="fp32")


def contenders(config: Config, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return a plain step and the traced ones, of one model."""
    torch.manual_seed(0)
    model = GPT(config, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (config.global_batch_size, config.seq_len))

    def run_passes() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(tokens)
        targets = tokens.flatten()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets).backward()

    def step() -> None:
        run_passes()
        optimizer.step()
        optimizer.zero_grad()

    def step_under_a_report() -> None:
        with distamp.precision_report(model):
            step()

    return {
        "plain step": step,
        "precision_report": step_under_a_report,
        "PrecisionContract.check": lambda: CONTRACT.check(step, model, optimizer),
        "find_first_nonfinite": lambda: distamp.find_first_nonfinite(run_passes, model),
    }


def main(
    rounds: int = 15, layers: int = 2, d_model: int = 96, seq_len: int = 64, precision: str = "fp32"
) -> None:
    """Time each tool.

    Args:
        rounds: Timed rounds.
        layers: Blocks of the model.
        d_model: Its channels.
        seq_len: Tokens of an example.
        precision: fp32, or bf16 for an autocast region. A CPU without bf16 products takes so long
            for them that the tools are lost in their time.
    """
    config = Config(layers=layers, d_model=d_model, seq_len=seq_len, global_batch_size=8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    timings = interleave(contenders(config, dtype), rounds, clock=time.process_time)
    rows = []
    for name, times in timings.items():
        rows.append((name, format_median(times), format_ratio(times, timings["plain step"])))
    print_table(("step", "ms", "of a plain step"), rows)


if __name__ == "__main__":
    run_command(main)
