"""Text from a trained model: ``python -m launch.sample runs/latest``."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from launch.checkpoint import load_run
from launch.config import Config
from launch.data import Data, load_data, text_of
from launch.folder import read_about
from launch.stop import exit_code_of
from launch.usage import Parser, require


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
        likeliest = logits.topk(min(top_k or len(logits), len(logits)))
        chosen = likeliest.indices[:1]
        if temperature > 0:
            odds = (likeliest.values / temperature).softmax(0)
            chosen = likeliest.indices[torch.multinomial(odds, 1)]
        tokens = torch.cat([tokens, chosen])
        yield int(chosen)


def main(args: Sequence[str] | None = None) -> int:
    """Print text that a run's model goes on with; return the exit code."""
    parser = Parser("python -m launch.sample", (__doc__ or "").partition(":")[0])
    add = parser.add_argument
    add("run", type=Path, help="the folder of a run, or one of its checkpoints")
    add("--prompt", default="\n", help="what the text begins with [an end of line]")
    add("--tokens", type=int, default=300, help="how many to draw [300]")
    add("--temperature", type=float, default=0.8, help="below 1: likelier tokens [0.8]")
    add("--top-k", type=int, default=40, help="choose among so many; 0: all [40]")
    add("--seed", type=int, default=0, help="of the draw [0]")
    add("--tokenizer", type=Path, help="a tokenizer.json, where the run was given none")

    def program() -> None:
        given = parser.read(args)
        ranges = "--tokens, --temperature and --top-k must be 0 or more, --prompt not empty"
        require(min(given.tokens, given.temperature, given.top_k) >= 0 and given.prompt, ranges)
        about = read_about(given.run)
        unread = f"{given.run}: its data are no text; for tokens of a .bin, give --tokenizer"
        require(about["text"] or given.tokenizer, unread)

        def load(config: Config) -> Data:
            if config.model == "gpt" or config.model.startswith("hf:"):
                text = text_of(given.tokenizer or config.tokenizer)
                return Data(about["data"], (), (), about["classes"], text)
            return load_data(config)  # a model of one's own may look at them

        job = load_run(given.run, load)
        text = text_of(given.tokenizer or job.config.tokenizer)
        torch.manual_seed(given.seed)
        prompt = torch.tensor(text.encode(given.prompt), device=job.device)
        with job.amp.autocast():
            drawn = sample(job.model, prompt, job.config.block, given.temperature, given.top_k)
            print(given.prompt + text.decode([*islice(drawn, given.tokens)]))

    return exit_code_of(program)


if __name__ == "__main__":
    sys.exit(main())
