"""Measurements that need a GPU. benchmarks/gpu.sh runs each part in a separate process.

    python -m benchmarks.gpu training | syncs | graphs

On the simulated accelerator under CUDA's name the figures mean nothing, and benchmarks/gpu.sh
leaves out the parts that cannot run there.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import format_ratio, interleave, print_table, run_command
from distamp import DistGradScaler, autocast
from launch.config import Config
from launch.model import GPT

FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def simulated() -> bool:
    """Return whether "cuda" is the simulated accelerator."""
    return torch.cuda.get_device_name() == "simulated"


class Training:
    """The training of a GPT in one format, with AdamW and a scaler.

    Args:
        dtype: Dtype of the autocast region, or None for fp32.
        fused: Use a fused AdamW.
        scaler: The scaler. The default is one of distamp.
    """

    def __init__(
        self, dtype: torch.dtype | None, *, fused: bool = True, scaler: Any = None
    ) -> None:
        layers, size, batch_size = 12, 1024, 8
        if simulated():
            layers, size, batch_size = 2, 64, 2
        config = Config(layers=layers, heads=size // 64, d_model=size, seq_len=size)
        torch.manual_seed(0)
        self.model: nn.Module = GPT(config, 256).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.scaler = scaler or DistGradScaler("cuda", enabled=dtype == torch.float16)
        self.tokens = torch.randint(256, (batch_size, size), device="cuda")
        self.dtype = dtype

    def compute_loss(self) -> Tensor:
        """Return the scaled loss of a forward pass."""
        with autocast("cuda", dtype=self.dtype, enabled=self.dtype is not None):
            logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), self.tokens.flatten())
        return self.scaler.scale(loss)  # type: ignore[no-any-return]

    def step(self) -> None:
        """Take a whole step."""
        self.optimizer.zero_grad()
        self.compute_loss().backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def measure_activations(self) -> str:
        """Return the MiB that a forward pass leaves allocated."""
        if simulated():
            return "not known here"
        self.optimizer.zero_grad()
        bytes_before = torch.cuda.memory_allocated()
        loss = self.compute_loss()
        activation_bytes = torch.cuda.memory_allocated() - bytes_before
        del loss
        return f"{activation_bytes / 2**20:.0f}"


def training() -> None:
    """Print the time and memory of a step in each format."""
    trainings = {name: Training(dtype) for name, dtype in FORMATS.items()}
    steps = {name: run.step for name, run in trainings.items()}
    times = interleave(steps, 2 if simulated() else 30)
    rows = []
    for name, run in trainings.items():
        milliseconds = 1e3 * min(times[name])
        speedup = format_ratio(times["fp32"], times[name])
        rows.append([name, f"{milliseconds:.1f}", speedup, run.measure_activations()])
    header = ["", "least ms a step", "times as fast as fp32", "activations, MiB"]
    print_table(header, rows)


def syncs() -> None:
    """Count the waits of the host in a step. A wait in a fused step of distamp is an error."""
    rows = []
    for fused in (True, False):
        for scaler_class in (DistGradScaler, torch.amp.GradScaler):
            run = Training(torch.float16, fused=fused, scaler=scaler_class("cuda"))
            run.step()
            run.step()
            must_not_wait = fused and scaler_class is DistGradScaler
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("error" if must_not_wait else "warn")
                run.step()
                torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(warning.message) for warning in caught)
            rows.append([scaler_class.__name__, "fused" if fused else "plain", waits])
    print_table(["scaler", "AdamW", "waits in a step"], rows)


def graphs() -> None:
    """Compare steps from a CUDA graph of the forward and backward passes with plain steps."""
    plain = train_for_graphs(captured=False)
    replayed = train_for_graphs(captured=True)
    torch.testing.assert_close(replayed, plain, rtol=1e-3, atol=1e-4)
    print("five replayed steps equal five without a graph, within 1e-3")


def train_for_graphs(captured: bool) -> list[Tensor]:
    """Return the weights after eight steps. The last five may come from a graph."""
    run = Training(torch.float16)
    for _ in range(3):
        run.step()
    run.optimizer.zero_grad()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run.compute_loss().backward()
    for _ in range(5):
        # A graph writes to the gradients that it has captured, so they must stay allocated.
        run.optimizer.zero_grad(set_to_none=False)
        if captured:
            graph.replay()
        else:
            run.compute_loss().backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()
    return [p.detach().cpu() for p in run.model.parameters()]


PARTS = {"training": training, "syncs": syncs, "graphs": graphs}


def main(part: str, /) -> None:
    """Run a part: training, syncs or graphs."""
    PARTS[part]()


if __name__ == "__main__":
    run_command(main)
