"""Every layout trains to the losses of one process, and goes on from any other."""

from pathlib import Path

import pytest
import torch

from launch.config import read_config
from tests.launch import jobs
from tests.launch.jobs import FP16, TINY, losses, weights

# Runs and ranks that its tests share.
pytestmark = pytest.mark.xdist_group("launch layouts")

LAYOUTS = {
    "ddp, selective": ("--activation-checkpointing", "selective"),
    "fsdp2": ("--shard", -1),
    "hsdp": ("--shard", 2),
    "hsdp, checkpointed": ("--shard", 2, "--activation-checkpointing", "all"),
    "tp": ("--tp", 4),
    "fsdp2 x tp": ("--shard", 2, "--tp", 2),
    "hsdp, hook": ("--shard", 2, "--comm-hook", "fp16"),
}
STEPS = ("--steps", 3, "--keep-checkpoints", 0, *TINY)
# Only the order of additions differs in fp32; products round otherwise once they are divided.
TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp16-O2": 1e-2}


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


CELLS = [
    *((layout, "fp32") for layout in LAYOUTS if layout != "hsdp"),
    *(("fsdp2 x tp", "fp16"), ("fsdp2", "bf16"), ("hsdp", "fp16-O2")),
]


@pytest.mark.parametrize(("layout", "precision"), CELLS)
def test_layout_has_the_losses_of_one_process(alone, text, tmp_path, ranks4, layout, precision):
    args = ("--data", text, *STEPS, *LAYOUTS[layout], "--precision", precision)
    found, expected = ranks4.run(jobs.train, tmp_path, args)[0], alone[precision]
    # What the first step ran in is what the level promises, evaluations before it or not.
    assert (tmp_path / "precision.txt").read_text().startswith("0 violations")
    tolerance = 5e-3 if "hook" in layout else TOLERANCE[precision]
    for name, rel in (("loss", tolerance), ("validation_loss", tolerance), ("gradient_norm", 2e-2)):
        ours, theirs = ([row[name] for row in rows if name in row] for rows in (found, expected))
        assert ours == pytest.approx(theirs, rel=rel)


# -- a run goes on as if nothing had happened ---------------------------------------------------

# Dropout draws random numbers that differ between ranks.
RUN = (*TINY, *FP16, "--dropout", 0.1, "--steps", 8, "--save-every", 3)
RESUMED = {
    "ddp, int8, muon, ema": (
        *("--comm-hook", "int8", "--optimizer", "muon"),
        *("--ema", 0.9, "--async-save"),
    ),
    "fsdp2, asynchronous": ("--shard", -1, "--async-save"),
    "hsdp, fp16, sgd": ("--shard", 2, "--comm-hook", "fp16", "--optimizer", "sgd"),
    "tp": ("--tp", 2),
    "fp16-O2": ("--precision", "fp16-O2"),
}


@pytest.mark.parametrize("layout", RESUMED)
def test_resumed_run_has_the_losses_of_one_never_stopped(ranks, text, tmp_path, layout):
    pool = ranks(4 if "hsdp" in layout else 2)
    args = ("--data", text, *RUN, *RESUMED[layout])
    whole = pool.run(jobs.train, tmp_path, args)[0]
    # The newest checkpoint has lost what makes it whole, as in a run killed while it was written.
    (tmp_path / "checkpoints" / "step-00000008" / ".metadata").unlink()
    assert pool.run(jobs.train, tmp_path, ("--resume", tmp_path))[0] == whole
    assert whole[-1]["step"] == 8
    assert sum(not row.get("taken", True) for row in whole) > 1


# The config.json of a run before flags were renamed, as the launcher of that time wrote it.
FORMER_CONFIG = """\
{
 "model": "gpt",
 "model_args": [],
 "layers": 2,
 "heads": 4,
 "width": 16,
 "dropout": 0.1,
 "data": "DATA",
 "tokenizer": null,
 "token_dtype": "uint16",
 "block": 16,
 "batch": 8,
 "accumulate": 1,
 "workers": 0,
 "replicate": 0,
 "shard": 1,
 "tp": 1,
 "hook": "none",
 "device": "auto",
 "timeout": 300.0,
 "precision": "fp16",
 "check_precision": true,
 "init_scale": 1048576.0,
 "growth_interval": 2,
 "compile": false,
 "checkpoint_blocks": "all",
 "optimizer": "adamw",
 "lr": 0.01,
 "schedule": "cosine",
 "warmup": 3,
 "final_lr": 0.2,
 "weight_decay": 0.1,
 "beta1": 0.9,
 "beta2": 0.95,
 "eps": 0.0,
 "clip": 0.5,
 "skip_above": 0.0,
 "on_nonfinite": "skip",
 "ema": 0.0,
 "steps": 8,
 "seed": 0,
 "log_every": 1,
 "eval_every": 50,
 "eval_examples": 16,
 "save_every": 3,
 "keep": 3,
 "async_save": false,
 "run_dir": "RUN",
 "overwrite": false,
 "resume": null,
 "auto_resume": false,
 "max_time": 30.0,
 "tensorboard": false,
 "peak_tflops": 0.0,
 "check": false
}
"""


def test_run_with_the_former_names_of_flags_resumes_with_the_losses_of_one_never_stopped(
    text, tmp_path
):
    args = (
        *("--data", text, *TINY, "--precision", "fp16", "--init-scale", 2.0**20),
        *("--growth-interval", 2, "--dropout", 0.1, "--steps", 8, "--save-every", 3),
        *("--keep-checkpoints", 3, "--max-grad-norm", 0.5, "--min-lr-ratio", 0.2),
        *("--activation-checkpointing", "all", "--max-time", "30m", "--timeout", "300s"),
    )
    whole = jobs.train(tmp_path, args)
    present = read_config(tmp_path)
    former = FORMER_CONFIG.replace("DATA", str(text)).replace("RUN", str(tmp_path))
    (tmp_path / "config.json").write_text(former)
    assert read_config(tmp_path) == present
    (tmp_path / "checkpoints" / "step-00000008" / ".metadata").unlink()
    assert jobs.train(tmp_path, ("--resume", tmp_path)) == whole
    assert whole[-1]["step"] == 8
    assert sum(row.get("taken", False) for row in whole) > 1


def test_run_without_a_time_limit_in_the_former_format_has_none_now(tmp_path):
    former = FORMER_CONFIG.replace('"max_time": 30.0', '"max_time": Infinity')
    (tmp_path / "config.json").write_text(former)
    assert read_config(tmp_path).max_time == "none"


@pytest.mark.parametrize(
    ("before", "after"), [("--shard -1", "--shard 1"), ("--tp 2", "--shard -1 --tp 1")]
)
def test_run_goes_on_on_other_ranks_and_in_another_layout(
    ranks2, ranks4, text, tmp_path, before, after
):
    args = ("--data", text, *TINY, "--steps", 6, "--save-every", 3, "--keep-checkpoints", 3)
    alone = jobs.train(tmp_path / "alone", args)
    ranks4.run(jobs.train, tmp_path / "run", (*args, *before.split()))
    resume = ("--resume", tmp_path / "run" / "checkpoints" / "step-00000003", *after.split())
    found = ranks2.run(jobs.train, tmp_path / "run", resume)[0]
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"), [("fp16-O2", "fp32"), ("fp32", "fp16-O2"), ("fp16", "bf16-O2")]
)
def test_any_level_goes_on_from_any_other_with_the_weights_as_they_were_stepped(
    text, tmp_path, before, after
):
    args = ("--data", text, *TINY, "--steps", 4)
    rows = jobs.train(tmp_path, (*args, "--precision", before))
    more = ("--resume", tmp_path, "--precision", after, "--steps", 5, "--lr", 1e-9)
    again = jobs.train(tmp_path, (*more, "--ema", 0.9))
    tolerance = 2e-2 if "bf16" in after else 2e-3
    assert again[-1]["validation_loss"] == pytest.approx(rows[-1]["validation_loss"], rel=tolerance)
    # The weights themselves are those of before, in fp32: one more step at a rate of nothing.
    before, after = weights(tmp_path, 4), weights(tmp_path, 5)
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-8)
    # An average that begins here begins with them.
    torch.testing.assert_close(before, weights(tmp_path, 5, "ema."), rtol=1e-6, atol=1e-8)
