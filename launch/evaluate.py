"""The loss of a model on held-out examples: ``python -m launch.evaluate runs/latest``."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from cyclopts.types import NonNegativeInt

from launch.checkpoint import load_run
from launch.config import read_config
from launch.data import load_batches, load_data
from launch.folder import find_run_dir, read_data_json
from launch.job import Job
from launch.model import loss_function, mean_cross_entropy
from launch.program import make_main


@torch.no_grad()
def evaluate(job: Job, examples: int) -> dict[str, float]:
    """Return the mean loss over held-out examples, shared among the ranks.

    Args:
        job: A model, as it is called, and its data.
        examples: How many to read at most, spread evenly over those there are.
    """
    job.model.eval()
    layout, held_out, count = job.layout, job.data.held_out, job.microbatch_size
    loss, classifies = loss_function(job.model), loss_function(job.model) is mean_cross_entropy
    length, world = min(examples, len(held_out)), layout.data_world_size
    chosen = [place * len(held_out) // length for place in range(length)]
    own = chosen[layout.data_rank :: world]
    shares = [own[start : start + count] for start in range(0, -(-length // world), count)]
    # A sharded model needs every rank in each pass: one that has run out repeats an example, and
    # counts it for nothing.
    order = [share or chosen[:1] for share in shares]
    # Of the loss, of right answers, and of examples; the host waits for none of them.
    sums = torch.zeros(3, dtype=torch.float64, device=job.device)
    for share, batch in zip(shares, load_batches(held_out, order, job.device), strict=True):
        with job.amp.autocast():
            outputs = job.model(*batch.inputs, **batch.kwargs)
        sums[0] += len(share) * loss(outputs, batch.targets)
        if classifies:
            sums[1] += len(share) * (outputs.argmax(-1) == batch.targets).double().mean()
        sums[2] += len(share)
    loss_sum, right_sum, counted = layout.sum(*sums)
    measured = {"validation_loss": loss_sum / counted}
    if job.data.text is not None and job.config.tokenizer is None:  # each token is a byte
        measured["bits_per_byte"] = loss_sum / counted / math.log(2)
    return measured | ({"accuracy": right_sum / counted} if classifies else {})


def evaluate_run(run: Path, /, *, data: str | None = None, examples: NonNegativeInt = 0) -> None:
    """Print the loss of a run's newest checkpoint on held-out examples.

    Args:
        run: The folder of a run, or one of its checkpoints.
        data: Another text, or tokens: the last tenth of it is read.
        examples: How many; 0: all.
    """
    config, classes = read_config(find_run_dir(run)), read_data_json(run)["classes"]
    read = load_data(config.model_copy(update={"data": data or config.data}))
    job = load_run(run, replace(read, classes=classes))
    for name, value in evaluate(job, examples or len(job.data.held_out)).items():
        print(f"{name.replace('_', ' ')} {value:.4f}")


main = make_main("python -m launch.evaluate", evaluate_run)

if __name__ == "__main__":
    raise SystemExit(main())
