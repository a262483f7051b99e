"""Text from a trained model: ``python -m launch.sample runs/latest``."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from cyclopts.types import NonNegativeFloat, NonNegativeInt
from torch import Tensor, nn

from launch.checkpoint import load_run
from launch.config import read_config
from launch.data import Data, load_data, load_text_codec
from launch.folder import find_run_dir, read_data_json
from launch.program import make_main, require


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


def sample_run(
    run: Path,
    /,
    *,
    prompt: str = "\n",
    tokens: NonNegativeInt = 300,
    temperature: NonNegativeFloat = 0.8,
    top_k: NonNegativeInt = 40,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> None:
    """Print text that a run's model goes on with.

    Args:
        run: The folder of a run, or one of its checkpoints.
        prompt: What the text begins with.
        tokens: How many to draw.
        temperature: Below 1: likelier tokens.
        top_k: Choose among so many; 0: all.
        seed: Of the draw.
        tokenizer: A tokenizer.json, where the run was given none.
    """
    require(prompt, "--prompt: it must not be empty")
    about, config = read_data_json(run), read_config(find_run_dir(run))
    unread = f"{run}: its data are no text; for tokens of a .bin, give --tokenizer"
    require(about["text"] or tokenizer, unread)

    text = load_text_codec(tokenizer or config.tokenizer)
    data = Data(about["data"], (), (), about["classes"], text)
    if ":" in config.model and not config.model.startswith("hf:"):
        data = load_data(config)  # a model of one's own may look at them
    job = load_run(run, data)
    torch.manual_seed(seed)
    begun = torch.tensor(text.encode(prompt), device=job.device)
    with job.amp.autocast():
        drawn = sample(job.model, begun, job.config.seq_len, temperature, top_k)
        print(prompt + text.decode([*islice(drawn, tokens)]))


main = make_main("python -m launch.sample", sample_run)

if __name__ == "__main__":
    raise SystemExit(main())
