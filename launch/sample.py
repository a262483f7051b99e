"""Generate text with the model of a run: ``python -m launch.sample runs/latest``."""

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
from launch.model import read_logits
from launch.program import make_main, require


@torch.no_grad()
def sample(
    model: nn.Module, tokens: Tensor, seq_len: int, temperature: float, top_k: int
) -> Iterator[int]:
    """Yield one generated token after another, without an end.

    Args:
        model: Maps int64 tokens (batch, time) to logits (batch, time, classes).
        tokens: The prompt, int64 (time,).
        seq_len: The largest number of tokens that the model accepts.
        temperature: Temperature of the softmax. 0 takes the most likely token.
        top_k: Number of the most likely tokens to choose from. 0 chooses from all.
    """
    model.eval()
    while True:
        context = tokens[None, -seq_len:]
        logits = read_logits(model(context))[0, -1].float()
        k = top_k or len(logits)
        likeliest = logits.topk(min(k, len(logits)))
        token = likeliest.indices[:1]
        if temperature > 0:
            probabilities = (likeliest.values / temperature).softmax(0)
            token = likeliest.indices[torch.multinomial(probabilities, 1)]
        tokens = torch.cat([tokens, token])
        yield int(token)


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
    """Print a prompt and the text with which the model of a run continues it.

    Args:
        run: Folder of a run, or one of its checkpoints.
        prompt: Text to continue.
        tokens: Number of tokens to generate.
        temperature: Temperature of the softmax. Values below 1 prefer likely tokens.
        top_k: Number of the most likely tokens to choose from. 0 chooses from all.
        seed: Seed of the random choices.
        tokenizer: A tokenizer.json, for a run that was given none.
    """
    require(prompt, "--prompt: it must not be empty")
    about = read_data_json(run)
    require(
        about["text"] or tokenizer,
        f"{run}: its data are not text. If they are the tokens of a .bin file, add --tokenizer.",
    )
    config = read_config(find_run_dir(run))
    codec = load_text_codec(tokenizer or config.tokenizer)
    data = Data(about["data"], (), (), about["classes"], codec)
    if ":" in config.model and not config.model.startswith("hf:"):
        # The user's function that builds the model may read the data.
        data = load_data(config)
    job = load_run(run, data)
    torch.manual_seed(seed)
    prompt_tokens = torch.tensor(codec.encode(prompt), device=job.device)
    with job.amp.autocast():
        generated = sample(job.model, prompt_tokens, job.config.seq_len, temperature, top_k)
        text = codec.decode(list(islice(generated, tokens)))
    print(prompt + text)


main = make_main("python -m launch.sample", sample_run)

if __name__ == "__main__":
    raise SystemExit(main())
