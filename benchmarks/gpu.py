"""What only a GPU can show, part by part; benchmarks/gpu.sh runs them all, each in its own process.

    python -m benchmarks.gpu training | syncs | graphs

On the simulated accelerator under CUDA's name figures mean nothing; the script leaves out the parts
that it cannot run.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import command, interleave, ratio, table
from distamp import DistGradScaler, autocast
from launch.config import Config
from launch.model import GPT

FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def simulated() -> bool:
    """Return whether "cuda" is the simulated accelerator."""
    return torch.cuda.get_device_name() == "simulated"


class Training:
    """Steps of a GPT in one format, with a fused AdamW and distamp's scaler."""

    def __init__(
        self, dtype: torch.dtype | None, *, fused: bool = True, scaler: Any = None
    ) -> None:
        size = 64 if simulated() else 1024
        config = Config(
            layers=2 if simulated() else 12, heads=size // 64, d_model=size, seq_len=size
        )
        torch.manual_seed(0)
        self.model: nn.Module = GPT(config, 256).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler = scaler or DistGradScaler("cuda", enabled=dtype == torch.float16)
        self.tokens = torch.randint(256, (2 if simulated() else 8, size), device="cuda")
        self.dtype = dtype

    def loss(self) -> Tensor:
        """Return the scaled loss of a forward pass."""
        with autocast("cuda", dtype=self.dtype, enabled=self.dtype is not None):
            logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), self.tokens.flatten())
        return self.scaler.scale(loss)  # type: ignore[no-any-return]

    def step(self) -> None:
        """Take a whole step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def training() -> None:
    """Print the time and memory of a step in each format."""
    runs = {name: Training(dtype) for name, dtype in FORMATS.items()}
    times = interleave({name: run.step for name, run in runs.items()}, 2 if simulated() else 30)
    memory = {name: "not known here" if simulated() else _memory(run) for name, run in runs.items()}
    rows = [
        [name, f"{1e3 * min(times[name]):.1f}", ratio(times["fp32"], each), memory[name]]
        for name, each in times.items()
    ]
    table(["", "least ms a step", "times as fast as fp32", "activations, MiB"], rows)


def _memory(run: Training) -> str:
    run.optimizer.zero_grad()
    before = torch.cuda.memory_allocated()
    loss = run.loss()
    held = torch.cuda.memory_allocated() - before
    del loss
    return f"{held / 2**20:.0f}"


def syncs() -> None:
    """Count the host's waits in a step; in a fused step of distamp any is an error."""
    rows = []
    for fused in (True, False):
        for kind in (DistGradScaler, torch.amp.GradScaler):
            run = Training(torch.float16, fused=fused, scaler=kind("cuda"))
            run.step()
            run.step()
            strict = fused and kind is DistGradScaler
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("error" if strict else "warn")
                run.step()
                torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(each.message) for each in found)
            rows.append([kind.__name__, "fused" if fused else "plain", waits])
    table(["scaler", "AdamW", "waits in a step"], rows)


def graphs() -> None:
    """Capture forward and backward passes in a graph; replayed steps equal those without."""
    ends = []
    for captured in (False, True):
        run = Training(torch.float16)
        for _ in range(3):
            run.step()
        run.optimizer.zero_grad()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run.loss().backward()
        for _ in range(5):
            # A graph writes its gradients where it has captured them.
            run.optimizer.zero_grad(set_to_none=False)
            if captured:
                graph.replay()
            else:
                run.loss().backward()
            run.scaler.step(run.optimizer)
            run.scaler.update()
        ends.append([p.detach().cpu() for p in run.model.parameters()])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    print("five replayed steps equal five without a graph, within 1e-3")


PARTS = {part.__name__: part for part in (training, syncs, graphs)}


def main(part: str, /) -> None:
    """Run a part: training, syncs or graphs."""
    PARTS[part]()


if __name__ == "__main__":
    command(main)
