"""A step of a 25 M-parameter transformer between hosts: no hook, torch's hooks, distamp's formats.

    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link [--wrapper ddp] [--rate 100mbit]
        [--hosts 4] [--local 1] [--mtu 1500] [--rounds 5] [--only fp32 "torch fp16" fp16 auto]
    sudo OMP_NUM_THREADS=1 python -m benchmarks.shaped_link --wrapper fsdp2 [--keep]

Hosts are network namespaces joined by links of the given rate (tests/netns.py), with one rank or
several on each.
Every contender wraps a model of its own over the same weights, and takes its step in turn with the
others. A step takes as long as its slowest rank. Bytes come from the interfaces, without packet
headers, and stand beside what distamp's ``stats()`` counted. ``compute`` is the same step with
nothing sent; ``auto`` is what ``register(model, "auto")`` chose, which is printed.

fsdp2 times forward and backward by themselves. By default weights are gathered again in the
backward pass; with ``--keep`` they are not, and what the backward pass sends is gradients alone.
"""

import argparse
import ast
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import environment, markdown, ratio
from benchmarks.shaped import Clock, headers, link_speed, measured_in_turn, run_on_hosts, slowest
from distamp import comm_hooks

COMPUTE, FP32, TORCH_FP16, TORCH_BF16 = "compute", "fp32", "torch fp16", "torch bf16"
DDP = (COMPUTE, FP32, TORCH_FP16, TORCH_BF16, *comm_hooks.WIRE_FORMATS)
FSDP2 = (FP32, "fp16", "bf16")
FORWARD, BACKWARD = "forward", "backward"  # DDP's whole step is timed as backward
WIDTH, LAYERS, TOKENS = 512, 8, 32


class Transformer(nn.Module):
    """A byte-level transformer of 25.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 bytes (batch, time) to logits (batch, time, 256)."""
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.bytes(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=causal, is_causal=True)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrapper", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--keep", action="store_true", help="fsdp2: keep weights until backward")
    parser.add_argument("--rate", default="100mbit", help="of each link, as tc writes it")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--local", type=int, default=1, help="ranks of each host")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help=f"some of {', '.join(DDP)}, auto")
    given = parser.parse_args()
    names = given.only or list(DDP if given.wrapper == "ddp" else FSDP2)
    options = {
        "wrapper": given.wrapper,
        "keep": given.keep,
        "names": names,
        "rounds": given.rounds,
    }
    print(environment(), flush=True)
    ranks = run_on_hosts(
        "benchmarks.shaped_link",
        given.hosts,
        given.rate,
        given.mtu,
        options,
        timeout=7200,
        congestion=given.congestion,
        local=given.local,
    )
    print(
        f"{given.wrapper}, {ranks[0]['parameters'] / 1e6:.1f} M parameters, {given.hosts} hosts of"
        f" {given.local} ranks, {given.rate}, TCP's congestion control"
        f" {given.congestion}, packets of {given.mtu} bytes (headers {headers(given.mtu)});"
        " the slowest link carries"
        f" {min(rank['link'] for rank in ranks):.0f} Mbit/s of payload\n"
    )
    for choice in ranks[0]["choices"]:
        print(f"{choice}\n")
    if given.wrapper == "fsdp2":
        print(table(ranks, names, FORWARD, 0.0), end="\n\n")
    # Without --keep the backward pass gathers what the forward pass did.
    weights = 0.0
    if given.wrapper == "fsdp2" and not given.keep:
        weights = _sent(ranks[0], names[0], FORWARD)
    print(table(ranks, names, BACKWARD, weights))


def _sent(rank: dict[str, Any], name: str, phase: str) -> float:
    """Return the bytes of one phase, the median of all rounds."""
    return statistics.median(step[phase]["payload"] for step in rank["rounds"][name])


def table(ranks: list[dict[str, Any]], names: list[str], phase: str, weights: float) -> str:
    """Compare all contenders in one phase, in which so many bytes of weights are sent too."""
    rounds = [rank["rounds"] for rank in ranks]
    seconds = {name: slowest(rounds, name, phase) for name in names}
    sent = {name: _sent(ranks[0], name, phase) for name in names}
    rows = []
    for name in names:
        cells = [name, f"{statistics.median(seconds[name]):.2f}"]
        for peer in (FP32, TORCH_FP16):
            known = peer in names and peer != name
            cells.append(str(ratio(seconds[name], seconds[peer])) if known else "-")
        cells.append(f"{sent[name] / 1e6:.2f}")
        if phase == BACKWARD:
            cells += _gradients(name, sent, weights, ranks[0]["counted"].get(name))
        rows.append(cells)
    title = phase if FORWARD in ranks[0]["rounds"][names[0]][0] else "step"
    head = [f"{title} with", "seconds", "of fp32's", "of torch fp16's", "MB sent"]
    if phase == BACKWARD:
        head += ["of them gradients", "of fp32's", "by stats()", "difference"]
    return markdown(head, rows)


def _gradients(
    name: str, sent: dict[str, float], weights: float, counted: float | None
) -> list[str]:
    """Compare the bytes of gradients with fp32's and with what the hook counted."""
    mine = sent[name] - weights if name != COMPUTE else 0.0
    cells = [f"{mine / 1e6:.2f}", f"{mine / (sent[FP32] - weights):.3f}" if FP32 in sent else "-"]
    if counted is None:
        return [*cells, "-", "-"]
    return [*cells, f"{counted / 1e6:.2f}", f"{counted / mine - 1:+.2%}"]


def rank(wrapper: str, keep: bool, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure on this rank."""
    torch.manual_seed(0)
    base = Transformer()
    tokens = _tokens()
    steps: dict[str, Callable[[Clock], None]] = {}
    states: dict[str, Any] = {}
    for name in names:
        make = _ddp if wrapper == "ddp" else _fsdp2
        steps[name], states[name] = make(name, base, tokens, keep)
    speed = link_speed()
    before = {name: _counted(state) for name, state in states.items()}
    measured = measured_in_turn(steps, rounds, warmup=2)
    # The first two steps, in which buckets are laid out, are counted too.
    counted = {
        name: (_counted(state) - before[name]) / (rounds + 2)
        for name, state in states.items()
        if state is not None and state.stats().exchanges
    }
    return {
        "link": speed,
        "parameters": sum(p.numel() for p in base.parameters()),
        "rounds": measured,
        "counted": counted,
        "choices": [str(state.stats().choice) for name, state in states.items() if name == "auto"],
    }


def _counted(state: Any) -> int:
    return 0 if state is None else state.stats().total_bytes


def _tokens() -> tuple[Tensor, Tensor]:
    """Some of Python's own source, other bytes on each rank."""
    text = Path(ast.__file__).read_bytes()[dist.get_rank() * 1000 :][: TOKENS + 1]
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
    return row[:, :-1], row[:, 1:]


def _copy(base: Transformer, share: bool) -> Transformer:
    """Return a model of the same weights, in the same memory if ``share``."""
    model = Transformer()
    if share:
        for mine, theirs in zip(model.parameters(), base.parameters(), strict=True):
            mine.data = theirs.data
    else:
        model.load_state_dict(base.state_dict())
    return model


def _loss(model: nn.Module, tokens: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten())


def _ddp(
    name: str, base: Transformer, tokens: tuple[Tensor, Tensor], _: bool
) -> tuple[Callable[[Clock], None], Any]:
    # Every rank has drawn the same weights: sending them would take longer than a step.
    model = DistributedDataParallel(
        _copy(base, share=True), gradient_as_bucket_view=True, init_sync=False
    )
    state = None
    if name == TORCH_FP16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == TORCH_BF16:
        model.register_comm_hook(None, _torch_bf16)
    elif name not in (COMPUTE, FP32):
        state = comm_hooks.register(model, name)

    def step() -> None:
        _loss(model, tokens).backward()

    def timed(clock: Clock) -> None:
        if name == COMPUTE:
            with model.no_sync():
                clock(BACKWARD, step)
        else:
            clock(BACKWARD, step)
        model.zero_grad()

    return timed, state


# DDP refuses torch's hook by its name where there is no NCCL.
def _torch_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(state, bucket)


_torch_bf16.__annotations__ = default_hooks.bf16_compress_hook.__annotations__


def _fsdp2(
    name: str, base: Transformer, tokens: tuple[Tensor, Tensor], keep: bool
) -> tuple[Callable[[Clock], None], Any]:
    model = _copy(base, share=False)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=not keep)
    fully_shard(model, reshard_after_forward=not keep)
    state = None if name == FP32 else comm_hooks.register(model, name)

    def timed(clock: Clock) -> None:
        loss = clock(FORWARD, lambda: _loss(model, tokens))
        clock(BACKWARD, loss.backward)
        model.zero_grad()

    return timed, state


if __name__ == "__main__":
    main()
