"""Text from a trained model: ``python -m launch.sample runs/latest --prompt "def "``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from distamp import autocast
from launch.evaluate import load_run
from launch.usage import program, require


@torch.no_grad()
def sample(
    model: nn.Module, tokens: Tensor, block: int, temperature: float, top_k: int
) -> Iterator[int]:
    """Yield one token after another, for ever.

    Args:
        model: From int64 tokens (batch, time) to logits (batch, time, classes).
        tokens: int64 (time,), what it begins with.
        block: The most tokens that the model takes.
        temperature: Of the softmax; 0 takes the likeliest token.
        top_k: Among how many of the likeliest to choose; 0: all.
    """
    model.eval()
    while True:
        logits = model(tokens[None, -block:])[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax().reshape(1)
        else:
            if 0 < top_k < len(logits):
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            chosen = torch.multinomial((logits / temperature).softmax(0), 1)
        tokens = torch.cat([tokens, chosen])
        yield int(chosen)


def main(
    run: Path,
    /,
    prompt: str = "\n",
    tokens: int = 300,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> None:
    """Print text that a run's model goes on with; of the weights' average, if it has one.

    Args:
        run: The folder of a run, or one of its checkpoints.
        prompt: What it begins with.
        tokens: How many to draw.
        temperature: Below 1: likelier tokens more often; 0: the likeliest alone.
        top_k: Among how many of the likeliest tokens to choose; 0: all.
        seed: Of the draw.
    """
    ranges = "--tokens, --temperature and --top-k must be 0 or more, --prompt not empty"
    require(min(tokens, temperature, top_k) >= 0 and prompt, ranges)
    config, data, model, device = load_run(run)
    unread = f"{run}: its data are not text; for tokens of a .bin, train with --tokenizer"
    require(data.of_text, unread)
    torch.manual_seed(seed)
    begin = torch.tensor(data.encode(prompt), device=device)
    level = config.level
    with autocast(device.type, level.compute, enabled=level.autocasts):
        drawn = sample(model, begin, config.block, temperature, top_k)
        found = [next(drawn) for _ in range(tokens)]
    print(prompt + data.decode(found))


if __name__ == "__main__":
    sys.exit(program("launch.sample", main))
