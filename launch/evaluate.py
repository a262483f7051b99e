"""Evaluate a run on held-out examples: ``python -m launch.evaluate runs/latest``."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cyclopts.types import NonNegativeInt

from launch.checkpoint import load_run
from launch.config import read_config
from launch.data import load_batches, load_data
from launch.folder import find_run_dir, read_data_json
from launch.job import Job
from launch.model import loss_function, mean_cross_entropy, read_logits
from launch.program import make_main


@torch.no_grad()
def evaluate(job: Job, examples: int) -> dict[str, float]:
    """Return the mean loss over held-out examples, which the ranks divide among them.

    Collective: every rank must call this.

    Args:
        job: The run.
        examples: The largest number of examples, spread evenly over the held-out data.
    """
    job.model.eval()
    layout, held_out = job.layout, job.data.held_out
    compute_loss = loss_function(job.model)
    is_classifier = compute_loss is mean_cross_entropy
    count = min(examples, len(held_out))
    indices = [position * len(held_out) // count for position in range(count)]
    rank_indices = indices[layout.data_rank :: layout.data_world_size]
    most_per_rank = math.ceil(count / layout.data_world_size)
    counted_batches: list[Sequence[int]] = []
    loaded_batches: list[list[int]] = []
    for start in range(0, most_per_rank, job.microbatch_size):
        batch_indices = rank_indices[start : start + job.microbatch_size]
        counted_batches.append(batch_indices)
        # A sharded model needs every rank in each pass. A rank without examples repeats one, and
        # counts it zero times.
        loaded_batches.append(batch_indices or indices[:1])

    # The sums stay on the device until the end, so that the host does not wait for each batch.
    loss_sum, num_correct, num_examples = torch.zeros(3, dtype=torch.float64, device=job.device)
    batches = load_batches(held_out, loaded_batches, job.device)
    for counted, batch in zip(counted_batches, batches, strict=True):
        with job.amp.autocast():
            outputs = job.model(*batch.inputs, **batch.kwargs)
        loss_sum += len(counted) * compute_loss(outputs, batch.targets)
        if is_classifier:
            is_correct = read_logits(outputs).argmax(-1) == batch.targets
            num_correct += len(counted) * is_correct.double().mean()
        num_examples += len(counted)
    totals = layout.all_reduce_sum(loss_sum, num_correct, num_examples)
    mean_loss = totals[0] / totals[2]
    results = {"validation_loss": mean_loss}
    is_bytes = job.data.text is not None and job.config.tokenizer is None
    if is_bytes:
        results["bits_per_byte"] = mean_loss / math.log(2)
    if is_classifier:
        results["accuracy"] = totals[1] / totals[2]
    return results


def evaluate_run(run: Path, /, *, data: str | None = None, examples: NonNegativeInt = 0) -> None:
    """Print the loss of a run's newest checkpoint on held-out examples.

    Args:
        run: Folder of a run, or one of its checkpoints.
        data: Another text or file of tokens. Its last tenth is read.
        examples: Number of examples. 0 reads all of them.
    """
    config = read_config(find_run_dir(run))
    if data is not None:
        config = config.model_copy(update={"data": data})
    loaded = load_data(config)
    # The model has the classes of the data that it was trained on.
    classes = read_data_json(run)["classes"]
    job = load_run(run, replace(loaded, classes=classes))
    results = evaluate(job, examples or len(job.data.held_out))
    for name, value in results.items():
        label = name.replace("_", " ")
        print(f"{label} {value:.4f}")


main = make_main("python -m launch.evaluate", evaluate_run)

if __name__ == "__main__":
    raise SystemExit(main())
