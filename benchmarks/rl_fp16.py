"""fp16 and bf16 in reinforcement learning: how far the sampled policy is from the trained one.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/rl_fp16.py --plot rl_fp16.png

A policy writes bytes and is paid for those that are digits. Rollouts come from a copy for
inference, whose weights are cast outright and which decodes one byte at a time with a cache of keys
and values; the trainer runs the same weights under autocast, all bytes at once, sharded by FSDP2.
So the two compute the same probabilities with other kernels and other roundings, and what the
trainer takes for its own samples are those of a policy slightly beside it. "Defeating the
Training-Inference Mismatch via FP16" (arXiv:2510.26788) reports that fp16, whose mantissa has three
bits more than bf16's, makes that gap smaller. This prints the gap (the mean magnitude, over sampled
bytes, of log p_rollout - log p_train), an estimate of the KL divergence of the two, and the reward,
for both dtypes and several seeds.

Updates are GRPO's: of each prompt a group of answers, whose advantage is its reward beside the
group's mean and spread; one step on each batch of rollouts, without a correction for the mismatch.
"""

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distamp
from distamp import DistGradScaler

CLASSES = 256
DIGITS = torch.zeros(CLASSES, dtype=torch.bool)
DIGITS[ord("0") : ord("9") + 1] = True


class Block(nn.Module):
    """Attention and a feed-forward network; with a cache, of the newest position alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if cache is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            if cache:
                key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            cache[:] = [key, value]
            # As inference engines have it: one query against all keys, and a softmax in fp32.
            scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5
            mixed = scores.float().softmax(-1).to(value.dtype) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))


class Policy(nn.Module):
    """A byte-level GPT of the size of the launcher's default."""

    def __init__(self, width: int = 96, heads: int = 3, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.bytes = nn.Embedding(CLASSES, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(
        self, tokens: Tensor, caches: list[list[Tensor]] | None = None, start: int = 0
    ) -> Tensor:
        """Map int64 (batch, time) to logits (batch, time, 256)."""
        x = self.bytes(tokens) + self.places.weight[start : start + tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index])
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Rollout:
    """Answers to prompts.

    Attributes:
        tokens: int64 (answers, prompt and answer).
        log_probs: float32 (answers, answer), of each byte when it was sampled.
        rewards: float32 (answers,), the part of the bytes that are digits.
    """

    tokens: Tensor
    log_probs: Tensor
    rewards: Tensor


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor, length: int, generator: torch.Generator) -> Rollout:
    """Continue prompts byte by byte, with a cache of keys and values."""
    caches: list[list[Tensor]] = [[] for _ in policy.blocks]
    tokens = prompts
    said: list[Tensor] = []
    for index in range(prompts.shape[1] + length - 1):
        logits = policy(tokens[:, index : index + 1], caches, index)[:, -1].float()
        if index + 1 < prompts.shape[1]:
            continue
        log_probs = logits.log_softmax(-1)
        chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
        said.append(log_probs.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    answers = tokens[:, prompts.shape[1] :]
    return Rollout(tokens, torch.cat(said, 1), DIGITS[answers].float().mean(1))


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Return each answer's reward beside those of its group, in units of their spread."""
    groups = rewards.view(-1, group)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def log_probs_of(policy: Callable[[Tensor], Tensor], tokens: Tensor, prompt: int) -> Tensor:
    """Return the log probability of each byte of the answers, all of them at once."""
    logits = policy(tokens[:, :-1])[:, prompt - 1 :].float()
    return logits.log_softmax(-1).gather(2, tokens[:, prompt:, None]).squeeze(2)


def cast_copy(trained: nn.Module, dtype: torch.dtype) -> Policy:
    """Return a whole copy for inference, cast outright."""
    weights = {}
    for name, tensor in trained.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights[name] = whole.detach().clone()
    copy = Policy()
    copy.load_state_dict(weights)
    return copy.to(dtype).eval()


def train(dtype: torch.dtype, seed: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train one policy; return the gap and the reward of each update, over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    policy = Policy()
    for block in policy.blocks:
        fully_shard(block)
    fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, weight_decay=0.0)
    scaler = DistGradScaler("cpu", enabled=dtype is torch.float16)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = []
    for _ in range(options.updates):
        prompts = torch.randint(32, 127, (options.prompts, options.prompt), generator=generator)
        prompts = prompts.repeat_interleave(options.group, 0)
        rollout = sample(cast_copy(policy, dtype), prompts, options.length, generator)
        with distamp.autocast("cpu", dtype=dtype):
            log_probs = log_probs_of(policy, rollout.tokens, options.prompt)
        weights = advantages(rollout.rewards, options.group)[:, None]
        # On-policy, GRPO's ratio is 1, and its gradient that of the log probability.
        loss = -(weights * log_probs).mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        gap = rollout.log_probs - log_probs.detach()
        # Of samples of the rollout's policy: never negative, and the same in the mean.
        kl_each = (-gap).expm1() + gap
        found = torch.stack([kl_each.mean(), gap.abs().mean(), rollout.rewards.mean()]).double()
        dist.all_reduce(found)
        kl, magnitude, reward = (found / world).tolist()
        rows.append({"kl": kl, "gap": magnitude, "reward": reward})
    return rows


def summary(runs: dict[str, list[list[dict[str, float]]]]) -> str:
    """Return a table: over seeds, the mean and the spread of the gap and of the last rewards."""
    lines = [f"{'':6}{'gap':>22}{'KL':>24}{'reward, last tenth':>24}"]
    for name, seeds in runs.items():
        cells = []
        for key, last in (("gap", False), ("kl", False), ("reward", True)):
            each = [
                mean(row[key] for row in (rows[-max(1, len(rows) // 10) :] if last else rows))
                for rows in seeds
            ]
            cells.append(f"{mean(each):.3g} ± {stdev(each) if len(each) > 1 else 0:.1g}")
        lines.append(f"{name:6}{cells[0]:>22}{cells[1]:>24}{cells[2]:>24}")
    return "\n".join(lines)


def plot(runs: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Draw the gap and the reward of every run over its updates."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for (name, seeds), colour in zip(runs.items(), ("#d1701c", "#1f5fae"), strict=False):
        for number, rows in enumerate(seeds):
            label = name if number == 0 else None
            top.plot([row["gap"] for row in rows], color=colour, lw=0.8, label=label)
            bottom.plot([row["reward"] for row in rows], color=colour, lw=0.8, label=label)
    top.set_ylabel("mean |log p rollout - log p train|")
    top.set_yscale("log")
    bottom.set_ylabel("reward")
    bottom.set_xlabel("update")
    top.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="of each rank")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--prompt", type=int, default=4, help="bytes")
    parser.add_argument("--length", type=int, default=24, help="bytes of an answer")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo")
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for seed in range(options.seeds):
            rows = train(dtype, seed, options)
            runs.setdefault(name, []).append(rows)
            if dist.get_rank() == 0:
                last = rows[-1]
                print(
                    f"{name}, seed {seed}: gap {mean(r['gap'] for r in rows):.3g},"
                    f" reward {rows[0]['reward']:.3f} -> {last['reward']:.3f}",
                    flush=True,
                )
    if dist.get_rank() == 0:
        print(summary(runs))
        if options.plot is not None:
            plot(runs, options.plot)
            print(f"wrote {options.plot}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
