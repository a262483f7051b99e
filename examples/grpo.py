"""GRPO: a small model learns to sort digits, at a precision of one word.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo.py --precision fp16
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/grpo.py --plot grpo.png

A Llama of transformers is taught to sort by examples until half of its digits are right, and then
by rewards: of each prompt a group of answers, whose advantage is how many digits are in their place
beside the group's mean. Answers are drawn as inference engines draw them, by a second copy of the
model, cast outright, with another attention and a cache of keys, one digit at a time; the policy
computes under autocast, all digits at once, sharded by FSDP2. So both compute the same
probabilities by other kernels, and their roundings keep them apart: `logprob_mismatch` says how
far.

Without ``--precision`` it runs fp32, bf16 and fp16 one after the other, from the same start.
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

# A level of distamp, and what the sampler is cast to.
PRECISIONS = {
    "fp32": ("fp32", torch.float32),
    "bf16": ("bf16", torch.bfloat16),
    "fp16": ("fp16", torch.float16),
}
DIGITS, EQUALS = 6, 10
PROMPTS, GROUP, CLIP = 8, 8, 0.2  # of each rank


def new_model(attention: str = "eager") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=EQUALS + 1, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None,
        attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def prompts(count: int) -> Tensor:
    """Return digits to sort, and an equals sign: int64 (count, DIGITS + 1)."""
    digits = torch.randint(10, (count, DIGITS))
    return torch.cat([digits, torch.full((count, 1), EQUALS)], 1)


def places(tokens: Tensor) -> Tensor:
    """Return the share of each answer's digits that are where sorting puts them."""
    wanted = tokens[:, :DIGITS].sort(1).values
    return (tokens[:, -DIGITS:] == wanted).float().mean(1)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probability of each answer's digits, of logits (answers, DIGITS, all)."""
    return logits.float().log_softmax(-1).gather(2, tokens[:, -DIGITS:, None]).squeeze(2)


def taught(steps: int) -> LlamaForCausalLM:
    """Return a model that has seen sorted digits, in fp32; the same on every rank."""
    torch.manual_seed(0)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        given = prompts(64)
        tokens = torch.cat([given, given[:, :DIGITS].sort(1).values], 1)
        logits = model(tokens[:, :-1]).logits[:, DIGITS:]
        optimizer.zero_grad()
        (-log_probs(logits, tokens).mean()).backward()
        optimizer.step()
    return model


def draw(sampler: LlamaForCausalLM, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts with an answer each, and the log probabilities of its digits as drawn."""
    drawn = sampler.eval().generate(
        given, attention_mask=torch.ones_like(given), do_sample=True, top_k=0,
        max_new_tokens=DIGITS, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    return drawn.sequences, log_probs(torch.stack(drawn.logits, 1), drawn.sequences)


def train(precision: str, start: dict[str, Tensor], updates: int) -> list[dict[str, float]]:
    """Train from the same start; return the reward and the mismatch of each update."""
    level, dtype = PRECISIONS[precision]
    policy, sampler = new_model(), new_model("sdpa").to(dtype)
    policy.load_state_dict(start)
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, weight_decay=0.0)
    amp = initialize(policy, optimizer, level)
    torch.manual_seed(1 + dist.get_rank())  # other prompts and answers on each rank
    rows = []
    for _ in range(updates):
        given = prompts(PROMPTS).repeat_interleave(GROUP, 0)
        whole = StateDictOptions(full_state_dict=True)
        sampler.load_state_dict(get_model_state_dict(policy, options=whole))
        tokens, sampled = draw(sampler, given)
        rewards = places(tokens).view(PROMPTS, GROUP)
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        found = {}
        for _ in range(2):  # steps on the same answers
            amp.zero_grad()
            with amp.autocast():
                logits = amp.model(input_ids=tokens[:, :-1]).logits[:, DIGITS:]
            trained = log_probs(logits, tokens)
            found = found or logprob_mismatch(sampled, trained)
            ratio = (trained - sampled).exp()
            gains = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            amp.backward(-gains.mean())
            amp.clip_grad_norm_(1.0)
            amp.step()
        reward = rewards.mean()
        dist.all_reduce(reward)
        rows.append(found | {"reward": reward.item() / dist.get_world_size()})
    return rows


def summary(rows: list[dict[str, float]]) -> str:
    """Return a line: the reward at both ends, and the mean mismatch."""
    tenth = max(1, len(rows) // 10)
    first, last = (mean(row["reward"] for row in part) for part in (rows[:tenth], rows[-tenth:]))
    names = [f"mismatch/{each}" for each in ("token_abs_mean", "token_k3", "sequence_ess")]
    words = [f"{each} {mean(row[each] for row in rows):.6g}" for each in names]
    return ", ".join([f"reward {first:.3f} -> {last:.3f}", *words])


def draw_curves(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw the reward and the mismatch of each precision over its updates."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for name, rows in runs.items():
        for axis, key in zip(axes, ("reward", "mismatch/token_abs_mean"), strict=True):
            axis.plot([row[key] for row in rows], label=name, lw=1)
    axes[0].set(ylabel="digits in their place")
    axes[1].set(ylabel="mean |log p sampled - log p trained|", yscale="log", xlabel="update")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=PRECISIONS, help="all of them, if not given")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    start = taught(40).state_dict()
    runs = {}
    for name in [given.precision] if given.precision else PRECISIONS:
        runs[name] = train(name, start, given.updates)
        if dist.get_rank() == 0:
            print(f"{name}: {summary(runs[name])}", flush=True)
    if dist.get_rank() == 0 and given.plot is not None:
        draw_curves(runs, given.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
