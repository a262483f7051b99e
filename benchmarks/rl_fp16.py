"""fp16 and bf16 in reinforcement learning: how far the sampled policy is from the trained one.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.rl_fp16 --plot rl_fp16.png

A GPT-2 of transformers, not trained before, writes bytes and is paid for those that are digits.
Rollouts come from a copy for inference, whose weights are cast outright and whose ``generate``
decodes one byte at a time with a cache of keys and values; the trainer runs the same weights under
autocast, all bytes at once, sharded by FSDP2. So the two compute the same probabilities with other
kernels and other roundings, and what the trainer takes for its own samples are those of a policy
slightly beside it. "Defeating the Training-Inference Mismatch via FP16" (arXiv:2510.26788) reports
that fp16, whose mantissa has three bits more than bf16's, makes that gap smaller. This prints the
gap (the mean magnitude, over sampled bytes, of log p_rollout - log p_train), an estimate of the KL
divergence of the two, and the reward, for both dtypes and several seeds.

Updates are GRPO's: of each prompt a group of answers, whose advantage is its reward beside the
group's mean and spread; one step on each batch of rollouts, without a correction for the mismatch.
"""

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import distamp
from benchmarks.common import environment, markdown
from distamp import DistGradScaler

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = StateDictOptions(full_state_dict=True)
# Of each update, by run: the KL divergence, the gap and the reward.
Runs = dict[str, list[list[dict[str, float]]]]


def new_policy() -> Any:
    """Return a GPT-2 of bytes, of the size of the launcher's default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"n_positions": 64, "n_embd": 96, "n_layer": 2, "n_head": 3}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=256, initializer_range=0.05, **size, **no_dropout, **ends)
    )


def rollout(
    trained: Any, dtype: torch.dtype, prompts: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Continue prompts by a whole copy, cast outright.

    Returns:
        int64 (answers, prompt and answer), and float32 (answers, answer): the log probability of
        each byte of an answer when it was sampled.
    """
    copy = new_policy()
    copy.load_state_dict(get_model_state_dict(trained, options=WHOLE))
    done = (
        copy.to(dtype)
        .eval()
        .generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    )
    return done.sequences, log_probs_of(torch.stack(done.logits, 1), done.sequences)


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probability of each byte of the answers, of logits (answers, answer, 256)."""
    answers = tokens[:, -logits.shape[1] :, None]
    return logits.float().log_softmax(-1).gather(2, answers).squeeze(2)


def train(dtype: torch.dtype, seed: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """Train one policy; return the gap and the reward of each update, over all ranks."""
    torch.manual_seed(seed)
    policy = new_policy()
    for block in policy.transformer.h:
        fully_shard(block)
    fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=given.lr, weight_decay=0.0)
    scaler = DistGradScaler("cpu", enabled=dtype is torch.float16)
    torch.manual_seed(1000 * seed + dist.get_rank())  # other prompts and answers on each rank
    rows = []
    for _ in range(given.updates):
        prompts = torch.randint(32, 127, (given.prompts, given.prompt))
        prompts = prompts.repeat_interleave(given.group, 0)
        tokens, sampled = rollout(policy, dtype, prompts, given.length)
        digits = (tokens >= ord("0")) & (tokens <= ord("9"))
        rewards = digits[:, given.prompt :].float().mean(1)
        groups = rewards.view(-1, given.group)
        spread = groups.std(1, keepdim=True) + 1e-4
        advantages = (groups - groups.mean(1, keepdim=True)) / spread
        with distamp.autocast("cpu", dtype=dtype):
            logits = policy(tokens[:, :-1]).logits[:, given.prompt - 1 :]
        log_probs = log_probs_of(logits, tokens)
        # On-policy, GRPO's ratio is 1, and its gradient that of the log probability.
        scaler.scale(-(advantages.view(-1, 1) * log_probs).mean()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        gap = sampled - log_probs.detach()
        # Of samples of the rollout's policy: never negative, and the same in the mean.
        kl_each = (-gap).expm1() + gap
        found = torch.stack([kl_each.mean(), gap.abs().mean(), rewards.mean()]).double()
        dist.all_reduce(found)
        kl, magnitude, reward = (found / dist.get_world_size()).tolist()
        rows.append({"KL": kl, "gap": magnitude, "reward": reward})
    return rows


def summary(runs: Runs) -> str:
    """Return a table: over seeds, the mean and the spread of the gap and of the last rewards."""
    table = []
    for name, seeds in runs.items():
        last = [rows[-max(1, len(rows) // 10) :] for rows in seeds]
        cells = [name]
        for key, chosen in (("gap", seeds), ("KL", seeds), ("reward", last)):
            each = [mean(row[key] for row in rows) for rows in chosen]
            cells.append(f"{mean(each):.3g} ± {stdev(each) if len(each) > 1 else 0:.1g}")
        table.append(cells)
    return markdown(["", "gap", "KL", "reward, last tenth"], table)


def plot(runs: Runs, path: Path) -> None:
    """Draw the gap and the reward of every run over its updates."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for (name, seeds), colour in zip(runs.items(), ("#d1701c", "#1f5fae"), strict=True):
        for number, rows in enumerate(seeds):
            for axis, key in zip(axes, ("gap", "reward"), strict=True):
                label = None if number else name
                axis.plot([row[key] for row in rows], color=colour, lw=0.8, label=label)
    axes[0].set(ylabel="mean |log p rollout - log p train|", yscale="log")
    axes[1].set(ylabel="reward", xlabel="update")
    axes[0].legend(frameon=False)
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
    given = parser.parse_args()
    dist.init_process_group("gloo")
    runs: Runs = {}
    for name, dtype in DTYPES.items():
        runs[name] = [train(dtype, seed, given) for seed in range(given.seeds)]
    if dist.get_rank() == 0:
        print(f"{environment()}\n\n{summary(runs)}")
        if given.plot is not None:
            plot(runs, given.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
