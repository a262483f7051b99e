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
    model = GPT(config, 256)
    tokens = torch.randint(256, (config.batch // _RANKS, config.block))
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
    rate = config.batch / _RANKS / seconds
    print(f"This CPU trains on {rate:,.0f} sequences a second and rank in fp16:", end=" ")
    print(f"{steps} steps of the usual {config.steps}.", flush=True)
    flags = {"precision": "fp16", "steps": steps, "warmup": steps // 8, "run-dir": run}
    flags |= {"growth-interval": steps // 16, "eval-every": steps // 8, "save-every": steps // 2}
    script = Path(__file__).with_name("train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(_RANKS), str(script), "--overwrite"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
