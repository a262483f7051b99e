"""Every layout trains to the losses of one process, and goes on from any other."""

from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.jobs import TINY

LAYOUTS = {
    "ddp": (),
    "fsdp2": ("--shard", -1),
    "hsdp": ("--shard", 2),
    "tp": ("--tp", 4),
    "fsdp2 x tp": ("--shard", 2, "--tp", 2),
    "hsdp, hook": ("--shard", 2, "--hook", "fp16"),
    "blocks": ("--shard", 2, "--checkpoint-blocks", "all"),
    "ddp, selective": ("--checkpoint-blocks", "selective"),
}
STEPS = ("--steps", 3, *TINY)
# Only the order of additions differs in fp32; products round otherwise once they are divided.
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "O2": 1e-2}


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, jobs.Rows]:
    """What one process records in each precision."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        precision: jobs.train(
            folder / precision, ("--data", text, *STEPS, "--precision", precision)
        )
        for precision in TOLERANCE
    }


CELLS = [(layout, "fp32") for layout in LAYOUTS]
CELLS += [("fsdp2 x tp", "fp16"), ("fsdp2", "bf16"), ("hsdp", "O2")]


@pytest.mark.parametrize(("layout", "precision"), CELLS)
def test_layout_has_the_losses_of_one_process(alone, text, tmp_path, ranks4, layout, precision):
    args = ("--data", text, *STEPS, *LAYOUTS[layout], "--precision", precision)
    found, expected = ranks4.run(jobs.train, tmp_path, args)[0], alone[precision]
    # What the first step ran in is what the level promises, evaluations before it or not.
    assert (tmp_path / "precision.txt").read_text().startswith("0 breaches")
    tolerance = 5e-3 if "hook" in layout else TOLERANCE[precision]
    for name, rel in (("loss", tolerance), ("validation_loss", tolerance), ("gradient_norm", 2e-2)):
        ours, theirs = ([row[name] for row in rows if name in row] for rows in (found, expected))
        assert ours == pytest.approx(theirs, rel=rel)
