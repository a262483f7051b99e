"""How often a training step makes the host wait, by kind: the table in docs/accelerators.md.

``python -m tests.simulated.syncs`` prints it as it is now; a test compares.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["PAGE", "PATHS", "counts", "documented", "table"]

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
_MARKS = ("<!-- host syncs -->", "<!-- end of host syncs -->")

FUSED = {"fused": True}
# What a row of the table runs: ranks, the optimizer's implementation, and how the step is made.
PATHS: dict[str, tuple[int, dict[str, bool], str]] = {
    "one process, fused": (1, FUSED, "step"),
    "one process, foreach": (1, {"foreach": True}, "step"),
    "one process, for-loop": (1, {"foreach": False, "fused": False}, "step"),
    "one process, fused, `unscale_` and torch's clipping": (1, FUSED, "clip"),
    "one process, fused, the scaler's clipping": (1, FUSED, "own clip"),
    "one process, fused, fp32 masters": (1, FUSED, "masters"),
    "one process, fused, `stepped()` asked": (1, FUSED, "ask"),
    "one process, fused, `get_scale()` asked": (1, FUSED, "scale"),
    "DDP, fused": (2, FUSED, "step"),
    "DDP, foreach": (2, {"foreach": True}, "step"),
    "DDP, fused, `unscale_` and torch's clipping": (2, FUSED, "clip"),
    "DDP, fused, the scaler's clipping": (2, FUSED, "own clip"),
    "DDP, fused, fp32 masters": (2, FUSED, "masters"),
    "DDP, fused, `stepped()` asked": (2, FUSED, "ask"),
    "DDP, fused, fp16 hook": (2, FUSED, "hook"),
    "DDP, fused, fp16 hook, attached": (2, FUSED, "attach"),
    "FSDP1, fused": (2, FUSED, "step"),
    "FSDP2, fused": (2, FUSED, "step"),
    "FSDP2, foreach": (2, {"foreach": True}, "step"),
    "FSDP2, fused, the scaler's clipping": (2, FUSED, "own clip"),
    "FSDP2, fused, fp16 hook, attached": (2, FUSED, "attach"),
    "FSDP2, CPU offload, fused": (2, FUSED, "step"),
    "FSDP2, CPU offload, foreach": (2, {"foreach": True}, "step"),
}
STEPS = 8


def counts(path: str, mine: bool) -> Any:
    """The host syncs of a steady step on this rank; torch's own error where it has no such path."""
    from tests.simulated.device import counted

    _, implementation, how = PATHS[path]
    device = f"sim:{torch.accelerator.current_device_index()}"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    model, optimizer, scaler = _made(path, net, implementation, how, mine)
    x = torch.ones(4, 16, device=device, dtype=next(net.parameters()).dtype)
    for _ in range(STEPS):
        with counted() as found:
            _step(model, optimizer, scaler, x, how)
    return dict(found)


def _made(path: str, net: Any, implementation: Any, how: str, mine: bool) -> Any:
    from distamp import DistGradScaler
    from distamp.comm_hooks import register
    from tests.ranks import mesh

    settings: dict[str, Any] = {}
    if how == "masters":
        net.half()
        settings["fp16_grads"] = "master"
    model: Any = net
    if path.startswith("DDP"):
        model = nn.parallel.DistributedDataParallel(net)
    elif path.startswith("FSDP1"):
        model = torch.distributed.fsdp.FullyShardedDataParallel(net, use_orig_params=True)
    elif path.startswith("FSDP2"):
        policy: dict[str, Any] = {}
        if "offload" in path:
            policy["offload_policy"] = torch.distributed.fsdp.CPUOffloadPolicy()
        model = torch.distributed.fsdp.fully_shard(net, mesh=mesh((2,), ("shard",)), **policy)
    optimizer = torch.optim.AdamW(model.parameters(), **implementation)
    if how == "masters":
        from distamp.scaler import MasterParameters

        MasterParameters(optimizer)
    if not mine:
        return model, optimizer, torch.amp.GradScaler("sim", init_scale=64.0)
    scaler = DistGradScaler("sim", init_scale=64.0, **settings)
    if how in ("hook", "attach"):
        state = register(model, "fp16")
        if how == "attach":
            scaler.attach(state)
    return model, optimizer, scaler


def _step(model: Any, optimizer: Any, scaler: Any, x: Any, how: str) -> None:
    optimizer.zero_grad()
    scaler.scale(model(x).float().square().mean()).backward()
    if how == "clip":
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif how == "own clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    if how == "ask":
        scaler.stepped(optimizer)
    scaler.update()
    if how == "scale":
        scaler.get_scale()


def _shown(found: dict[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) or "none"


def table(run: Callable[[int, str, bool], list[dict[str, int]]]) -> str:
    """The table, from what ``run(ranks, path, mine)`` returns for each rank."""
    rows = ["| a step | DistGradScaler | torch.amp.GradScaler |", "|---|---|---|"]
    for path, (ranks, _, how) in PATHS.items():
        cells = []
        for mine in (True, False):
            if not mine and how in ("own clip", "masters", "ask", "hook", "attach"):
                cells.append("")
                continue
            first, *others = run(ranks, path, mine)
            assert all(each == first for each in others), (path, first, others)
            cells.append(_shown(first))
        rows.append(f"| {path} | {' | '.join(cells)} |")
    return "\n".join(rows)


def documented() -> str:
    """The table as the page has it."""
    return PAGE.read_text().split(_MARKS[0])[1].split(_MARKS[1])[0].strip()


def main() -> None:
    from tests.simulated.pools import SimPool

    pools = {ranks: SimPool(ranks) for ranks in (1, 2)}
    from tests.simulated import syncs

    print(table(lambda ranks, path, mine: pools[ranks].run(syncs.counts, path, mine)))
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
