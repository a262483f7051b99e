"""The loss of a model on held-out examples: ``python -m launch.evaluate runs/latest``."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from distamp.initialize import Amp
from launch.config import Config
from launch.data import Batch, Data, load_data
from launch.folder import about
from launch.job import load_run
from launch.model import loss_of, mean_loss
from launch.parallel import Layout
from launch.usage import Parser, exit_code_of, require


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Data, config: Config, amp: Amp, layout: Layout, device: torch.device
) -> dict[str, float]:
    """Return the mean loss over held-out examples, shared among the ranks.

    Args:
        model: As it is called.
        data: Of which up to ``--eval-examples`` are read, spread evenly.
        config: The run's flags.
        amp: Whose region the model runs in.
        layout: The ranks.
        device: Where the model is.
    """
    model.eval()
    classifies = loss_of(model) is mean_loss
    length, world = min(config.eval_examples, len(data.held_out)), layout.data_world
    count = config.batch // (world * config.accumulate)
    # Of the loss, of right answers, and of examples; the host waits for none of them.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for start in range(0, length, count * world):
        places = range(start + layout.data_rank, start + count * world, world)
        mine = [place for place in places if place < length]
        # A sharded model needs every rank in each pass: one that has run out repeats an example,
        # and counts it for nothing.
        chosen = [place * len(data.held_out) // length for place in mine or [start]]
        batch = Batch.of([data.held_out[index] for index in chosen], device)
        with amp.autocast():
            outputs = model(*batch.inputs, **batch.named)
        loss, right = loss_of(model)(outputs, batch.targets), torch.zeros((), device=device)
        if classifies:
            right = (outputs.argmax(-1) == batch.targets).double().mean()
        sums += torch.stack([loss.double(), right.double(), torch.ones_like(loss.double())]) * len(
            mine
        )
    loss_sum, right_sum, examples = layout.sum(*sums)
    measured = {"validation_loss": loss_sum / examples}
    if data.text is not None and data.text.of_bytes:
        measured["bits_per_byte"] = loss_sum / examples / math.log(2)
    return measured | ({"accuracy": right_sum / examples} if classifies else {})


def main(args: Sequence[str] | None = None) -> int:
    """Print the loss of a run's newest checkpoint; return the exit code."""
    parser = Parser("python -m launch.evaluate", (__doc__ or "").partition(":")[0])
    parser.add_argument("run", type=Path, help="the folder of a run, or one of its checkpoints")
    parser.add_argument("--data", help="another text, or tokens: the last tenth of it is read")
    parser.add_argument("--examples", type=int, default=0, help="how many; 0: all [0]")

    def program() -> None:
        given = parser.read(args)
        require(given.examples >= 0, f"--examples {given.examples}: it must be 0 or more")

        def load(config: Config) -> Data:
            if given.data is None:
                return load_data(config)
            classes = about(given.run)["classes"]
            return replace(load_data(replace(config, data=given.data)), classes=classes)

        of = load_run(given.run, load)
        config = replace(of.config, eval_examples=given.examples or len(of.data.held_out))
        measured = evaluate(of.model, of.data, config, of.amp, Layout(), of.device)
        for name, value in measured.items():
            print(f"{name.replace('_', ' ')} {value:.4f}")

    return exit_code_of(program)


if __name__ == "__main__":
    sys.exit(main())
