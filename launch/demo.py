"""What ``make train`` does: fp16 on two ranks, for as long as this machine takes a minute."""

import os
import sys
import time
from pathlib import Path

import torch

from distamp import autocast
from launch.config import Config
from launch.model import GPT, mean_loss

_RANKS, _SECONDS = 2, 55.0


def seconds_of_a_step(config: Config) -> float:
    """Measure one rank's forward and backward pass, in fp16 on the CPU."""
    model, tokens = GPT(config, 256), torch.zeros(config.batch // _RANKS, config.block).long()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        with autocast("cpu", torch.float16):
            logits = model(tokens)
        mean_loss(logits, tokens).backward()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Choose the number of steps, say so, and become torchrun."""
    config = Config()
    run = sys.argv[1] if len(sys.argv) > 1 else str(config.run_dir)
    seconds = seconds_of_a_step(config)
    steps = min(config.steps, max(80, int(_SECONDS / seconds) // 20 * 20))
    speed = f"This CPU takes {seconds:.2f} s for a step in fp16"
    print(f"{speed}: {steps} steps of the usual {config.steps}.", flush=True)
    script = Path(__file__).with_name("train.py")
    command = f"-m torch.distributed.run --standalone --nproc-per-node {_RANKS}".split()
    flags = f"--precision fp16 --steps {steps} --warmup {steps // 8}"
    flags += f" --growth-interval {steps // 16} --eval-every {steps // 8}"
    flags += f" --save-every {steps // 2} --overwrite --run-dir"
    os.execv(sys.executable, [sys.executable, *command, str(script), *flags.split(), run])


if __name__ == "__main__":
    main()
