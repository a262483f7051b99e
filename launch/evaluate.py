"""The loss of a model on held-out examples: ``python -m launch.evaluate runs/latest``."""

import copy
import math
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from distamp import autocast
from launch.checkpoint import load_weights
from launch.config import Config, read_config
from launch.data import Data, load_data
from launch.folder import checkpoint_of
from launch.model import build, fill, is_empty, loss_of, mean_loss
from launch.parallel import Layout, pick_device
from launch.usage import program


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    config: Config,
    region: AbstractContextManager[object],
    layout: Layout,
    device: torch.device,
) -> dict[str, float]:
    """Return the mean loss over held-out examples, shared among the ranks.

    Args:
        model: As it is called.
        data: Of which up to ``--eval-examples`` are read, spread evenly.
        config: The run's flags.
        region: What the model runs in: autocast, or nothing.
        layout: The ranks.
        device: Where the model is.
    """
    model.eval()
    classifies = loss_of(model) is mean_loss
    length = min(config.eval_examples, len(data.held_out))
    count = config.batch // (layout.data_world * config.accumulate)
    loss_sum = right = seen = torch.zeros((), dtype=torch.float64, device=device)
    # A sharded model needs every rank in each pass: one that has run out repeats what it had, and
    # counts it for nothing.
    for start in range(0, length, count * layout.data_world):
        places = range(
            start + layout.data_rank, start + count * layout.data_world, layout.data_world
        )
        mine = [place for place in places if place < length]
        examples = [data.held_out[p * len(data.held_out) // length] for p in mine or [start]]
        inputs, targets = (torch.stack(part).to(device) for part in zip(*examples, strict=True))
        with region:
            outputs = model(inputs)
        loss_sum = loss_sum + loss_of(model)(outputs, targets).double() * len(mine)
        if classifies:
            right = right + (outputs.argmax(-1) == targets).double().mean() * len(mine)
        seen = seen + len(mine)
    loss, hits, total = layout.sum(loss_sum, right, seen)
    found = {"validation_loss": loss / total}
    if data.of_bytes:
        found["bits_per_byte"] = loss / total / math.log(2)
    return found | ({"accuracy": hits / total} if classifies else {})


def load_run(path: Path, data: str | None = None) -> tuple[Config, Data, nn.Module, torch.device]:
    """Read a run's flags, its data and its model, whole, from its newest checkpoint.

    Args:
        path: The folder of a run, or one checkpoint.
        data: What to read in place of the run's data.

    Raises:
        UsageError: There is no such run, or it is damaged.
    """
    run, checkpoint = checkpoint_of(path)
    config = read_config(run)
    found, device = load_data(config), pick_device(config)
    if data is not None:
        found = replace(load_data(replace(config, data=data)), classes=found.classes)
    made = build(config, found)
    model = copy.deepcopy(made) if is_empty(made) else made.to(device)
    if is_empty(made):
        fill(model, made, config.seed, device)
    load_weights(checkpoint, model)
    return config, found, model, device


def main(run: Path, /, data: str | None = None, examples: int = 0) -> None:
    """Print the loss of a run's newest checkpoint; of the weights' average, if it has one.

    Args:
        run: The folder of a run, or one of its checkpoints.
        data: Another text, or tokens, in place of the run's; the last tenth of it is read.
        examples: How many held-out examples; 0: all.
    """
    config, found, model, device = load_run(run, data)
    config = replace(config, eval_examples=examples or len(found.held_out), accumulate=1)
    level = config.level
    region = autocast(device.type, level.compute, enabled=level.autocasts)
    for name, value in evaluate(model, found, config, region, Layout(), device).items():
        print(f"{name.replace('_', ' ')} {value:.4f}")


if __name__ == "__main__":
    sys.exit(program("launch.evaluate", main))
