"""GRPO: a small model learns to sort digits, at one of three precisions.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo.py --precision fp16
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo.py --plot grpo.png

A Llama of transformers first learns from sorted examples, until half of its digits are right, and
then from rewards. For each prompt it samples a group of answers. The advantage of an answer is its
number of digits in the right place, compared with the mean of the group.

A second copy of the model samples the answers as an inference engine does: cast to the precision,
with another attention kernel and a key-value cache, one digit at a time. The policy computes under
autocast, all digits at once, sharded by FSDP2. Both compute the same probabilities with different
kernels and therefore different rounding. `logprob_mismatch` measures the difference.

Without ``--precision``, the example runs fp32, bf16 and fp16 from the same start.
"""

import argparse
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from distamp import initialize
from distamp.report import logprob_mismatch

# The level of the policy and the dtype of the sampler.
PRECISIONS = {
    "fp32": ("fp32", torch.float32),
    "bf16": ("bf16", torch.bfloat16),
    "fp16": ("fp16", torch.float16),
}
DIGITS = 6
EQUALS = 10
# Prompts of each rank, answers to each prompt, and the clipping of the probability ratio.
PROMPTS = 8
GROUP = 8
CLIP = 0.2
# Number of optimizer steps on each set of answers.
STEPS_PER_UPDATE = 2


def make_model(attention: str = "eager") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=EQUALS + 1, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_prompts(count: int) -> Tensor:
    """Return digits to sort, and an equals sign: int64 (count, DIGITS + 1)."""
    digits = torch.randint(10, (count, DIGITS))
    equals = torch.full((count, 1), EQUALS)
    return torch.cat([digits, equals], 1)


def compute_rewards(tokens: Tensor) -> Tensor:
    """Return the fraction of each answer's digits that are in the right place."""
    correct_digits = tokens[:, :DIGITS].sort(1).values
    is_correct = tokens[:, -DIGITS:] == correct_digits
    return is_correct.float().mean(1)


def compute_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probability of each answer's digits from logits (answers, DIGITS, tokens)."""
    log_probs = logits.float().log_softmax(-1)
    return log_probs.gather(2, tokens[:, -DIGITS:, None]).squeeze(2)


def pretrain(steps: int) -> LlamaForCausalLM:
    """Return a model that was trained on sorted digits in fp32. All ranks get the same weights."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        prompts = make_prompts(64)
        answers = prompts[:, :DIGITS].sort(1).values
        tokens = torch.cat([prompts, answers], 1)
        logits = model(tokens[:, :-1]).logits[:, DIGITS:]
        loss = -compute_log_probs(logits, tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def sample_answers(sampler: LlamaForCausalLM, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the prompts with sampled answers, and the log probabilities of the sampled digits."""
    generated = sampler.eval().generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
        max_new_tokens=DIGITS, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    logits = torch.stack(generated.logits, 1)
    return generated.sequences, compute_log_probs(logits, generated.sequences)


def compute_advantages(rewards: Tensor) -> Tensor:
    """Return the rewards of groups (PROMPTS, GROUP), normalized in each group: (answers, 1)."""
    center = rewards.mean(1, keepdim=True)
    spread = rewards.std(1, keepdim=True) + 1e-4
    return ((rewards - center) / spread).view(-1, 1)


def train(precision: str, start: dict[str, Tensor], updates: int) -> list[dict[str, float]]:
    """Train from a state dict, and return the reward and the mismatch of each update."""
    level, dtype = PRECISIONS[precision]
    policy = make_model()
    sampler = make_model("sdpa").to(dtype)
    policy.load_state_dict(start)
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, weight_decay=0.0)
    amp = initialize(policy, optimizer, level)
    # Each rank gets other prompts and answers.
    torch.manual_seed(1 + dist.get_rank())
    rows = []
    for _ in range(updates):
        prompts = make_prompts(PROMPTS).repeat_interleave(GROUP, 0)
        options = StateDictOptions(full_state_dict=True)
        sampler.load_state_dict(get_model_state_dict(policy, options=options))
        tokens, sampled = sample_answers(sampler, prompts)
        rewards = compute_rewards(tokens)
        advantages = compute_advantages(rewards.view(PROMPTS, GROUP))
        mismatch: dict[str, float] = {}
        for step in range(STEPS_PER_UPDATE):
            amp.zero_grad()
            with amp.autocast():
                logits = amp.model(input_ids=tokens[:, :-1]).logits[:, DIGITS:]
            trained = compute_log_probs(logits, tokens)
            if step == 0:
                mismatch = logprob_mismatch(sampled, trained)
            ratio = (trained - sampled).exp()
            clipped_ratio = ratio.clamp(1 - CLIP, 1 + CLIP)
            gains = torch.minimum(ratio * advantages, clipped_ratio * advantages)
            amp.backward(-gains.mean())
            amp.clip_grad_norm_(1.0)
            amp.step()
        reward = rewards.mean()
        dist.all_reduce(reward)
        rows.append({**mismatch, "reward": reward.item() / dist.get_world_size()})
    return rows


def summarize(rows: list[dict[str, float]]) -> str:
    """Return a line with the reward at both ends and the mean mismatch."""
    tenth = max(1, len(rows) // 10)
    first = mean(row["reward"] for row in rows[:tenth])
    last = mean(row["reward"] for row in rows[-tenth:])
    parts = [f"reward {first:.3f} -> {last:.3f}"]
    for name in ("token_abs_mean", "token_k3", "sequence_ess"):
        value = mean(row[f"mismatch/{name}"] for row in rows)
        parts.append(f"mismatch/{name} {value:.6g}")
    return ", ".join(parts)


def draw_curves(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw the reward and the mismatch of each precision over the updates."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    rewards, mismatches = axes
    for name, rows in runs.items():
        rewards.plot([row["reward"] for row in rows], label=name, lw=1)
        mismatches.plot([row["mismatch/token_abs_mean"] for row in rows], label=name, lw=1)
    rewards.set(ylabel="digits in their place")
    rewards.legend(frameon=False)
    mismatches.set(ylabel="mean |log p sampled - log p trained|", yscale="log", xlabel="update")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=PRECISIONS, help="default: all three")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    precisions = [options.precision] if options.precision else list(PRECISIONS)
    dist.init_process_group("gloo")
    start = pretrain(40).state_dict()
    runs = {}
    for name in precisions:
        runs[name] = train(name, start, options.updates)
        if dist.get_rank() == 0:
            print(f"{name}: {summarize(runs[name])}", flush=True)
    if dist.get_rank() == 0 and options.plot is not None:
        draw_curves(runs, options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
