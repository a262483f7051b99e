"""Every layout trains to the losses of one process, and goes on from any other."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launch.config import read_config
from tests.launch import jobs
from tests.launch.jobs import FP16, TINY, losses, weights

slow = pytest.mark.slow
# Runs and ranks that its tests share.
pytestmark = pytest.mark.xdist_group("launch layouts")

STEPS = (*TINY, "--steps", 3, "--keep-checkpoints", 0)
# In fp32 only the order of additions differs. In half precision, a product that is divided
# between ranks also rounds its partial sums.
LOSS_TOLERANCE = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2, "fp16-O2": 1e-2}
NORM_TOLERANCE = 2e-2


TrainOnce = Callable[[str], jobs.Rows]


def flags(text: str) -> list[str]:
    """Return a line of flags as the list that the launcher takes."""
    return text.split()


@pytest.fixture(scope="module")
def one_process(text: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOnce:
    """Return the function that trains one process at a precision, once, and returns the records."""
    folder = tmp_path_factory.mktemp("one_process")

    @functools.cache
    def train(precision: str) -> jobs.Rows:
        args = ("--data", text, *STEPS, "--precision", precision)
        return jobs.train(folder / precision, args)

    return train


def values(rows: jobs.Rows, name: str) -> list[float]:
    """Return a column of the records, without the records that lack it."""
    return [row[name] for row in rows if name in row]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(
            "--activation-checkpointing selective", "fp32", id="ddp, selective-fp32", marks=slow
        ),
        pytest.param("--shard -1", "fp32", id="fsdp2-fp32", marks=slow),
        pytest.param("--shard -1", "bf16", id="fsdp2-bf16"),
        pytest.param(
            "--shard 2 --activation-checkpointing all",
            "fp32",
            id="hsdp, checkpointed-fp32",
            marks=slow,
        ),
        pytest.param("--shard 2 --comm-hook fp16", "fp32", id="hsdp, hook-fp32", marks=slow),
        pytest.param("--shard 2", "fp16-O2", id="hsdp-fp16-O2", marks=slow),
        pytest.param("--tp 4", "fp32", id="tp-fp32", marks=slow),
        pytest.param("--shard 2 --tp 2", "fp32", id="fsdp2 x tp-fp32", marks=slow),
        pytest.param("--shard 2 --tp 2", "fp16", id="fsdp2 x tp-fp16", marks=slow),
    ],
)
def test_layout_has_the_losses_of_one_process(
    one_process, text, tmp_path, ranks4, layout, precision
):
    args = ("--data", text, *STEPS, *flags(layout), "--precision", precision)
    rows = ranks4.run(jobs.train, tmp_path, args)[0]
    expected = one_process(precision)
    # An evaluation before the first training step must not hide how that step was computed.
    assert (tmp_path / "precision.txt").read_text().startswith("0 violations")
    sends_halves = "--comm-hook fp16" in layout
    tolerance = LOSS_TOLERANCE["fp16"] if sends_halves else LOSS_TOLERANCE[precision]
    for name in ("loss", "validation_loss"):
        assert values(rows, name) == pytest.approx(values(expected, name), rel=tolerance)
    norms = values(expected, "gradient_norm")
    assert values(rows, "gradient_norm") == pytest.approx(norms, rel=NORM_TOLERANCE)


# -- a run goes on as if nothing had happened ---------------------------------------------------

# Dropout draws random numbers that differ between ranks.
RUN = (*TINY, *FP16, "--dropout", 0.1, "--steps", 8, "--save-every", 3)


def tear_checkpoint(run: Path, step: int) -> None:
    """Remove the index of a checkpoint, as if the run had been killed while it was written."""
    (run / "checkpoints" / f"step-{step:08d}" / ".metadata").unlink()


@slow
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(
            2,
            "--comm-hook int8 --optimizer muon --ema 0.9 --async-save",
            id="ddp, int8, muon, ema",
        ),
        pytest.param(2, "--shard -1 --async-save", id="fsdp2, asynchronous"),
        pytest.param(
            4,
            "--shard 2 --comm-hook fp16 --optimizer sgd",
            id="hsdp, fp16, sgd",
        ),
        pytest.param(2, "--tp 2", id="tp"),
        pytest.param(2, "--precision fp16-O2", id="fp16-O2"),
    ],
)
def test_resumed_run_has_the_losses_of_one_never_stopped(ranks, text, tmp_path, size, layout):
    pool = ranks(size)
    never_stopped = pool.run(jobs.train, tmp_path, ("--data", text, *RUN, *flags(layout)))[0]
    tear_checkpoint(tmp_path, 8)
    resumed = pool.run(jobs.train, tmp_path, ("--resume", tmp_path))[0]
    assert resumed == never_stopped
    assert never_stopped[-1]["step"] == 8
    skipped = [row for row in never_stopped if not row.get("taken", True)]
    assert len(skipped) > 1, "a run without skipped steps does not show that the scale is resumed"


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


# The same run, with the flags of today.
PRESENT_FLAGS = """
--precision fp16 --init-scale 1048576 --growth-interval 2 --dropout 0.1 --steps 8 --save-every 3
--keep-checkpoints 3 --max-grad-norm 0.5 --min-lr-ratio 0.2 --activation-checkpointing all
--max-time 30m --timeout 300s
"""


def write_former_config(run: Path, text: Path) -> None:
    """Replace the config.json of a run by the one that the former launcher wrote."""
    former = FORMER_CONFIG.replace("DATA", str(text)).replace("RUN", str(run))
    (run / "config.json").write_text(former)


@slow
def test_run_with_the_former_names_of_flags_resumes_with_the_losses_of_one_never_stopped(
    text, tmp_path
):
    never_stopped = jobs.train(tmp_path, ("--data", text, *TINY, *flags(PRESENT_FLAGS)))
    present = read_config(tmp_path)
    write_former_config(tmp_path, text)
    assert read_config(tmp_path) == present
    tear_checkpoint(tmp_path, 8)
    assert jobs.train(tmp_path, ("--resume", tmp_path)) == never_stopped
    assert never_stopped[-1]["step"] == 8
    taken = [row for row in never_stopped if row.get("taken", False)]
    assert len(taken) > 1


def test_run_without_a_time_limit_in_the_former_format_has_none_now(tmp_path):
    former = FORMER_CONFIG.replace('"max_time": 30.0', '"max_time": Infinity')
    (tmp_path / "config.json").write_text(former)
    assert read_config(tmp_path).max_time == "none"


@slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("--shard -1", "--shard 1", id="fsdp2 on 4 ranks to ddp on 2"),
        pytest.param(
            "--tp 2",
            "--shard -1 --tp 1",
            id="ddp x tp on 4 ranks to fsdp2 on 2",
        ),
    ],
)
def test_run_goes_on_on_other_ranks_and_in_another_layout(
    ranks2, ranks4, text, tmp_path, before, after
):
    args = ("--data", text, *TINY, "--steps", 6, "--save-every", 3, "--keep-checkpoints", 3)
    expected = jobs.train(tmp_path / "one_process", args)
    run = tmp_path / "run"
    ranks4.run(jobs.train, run, (*args, *flags(before)))
    resume = ("--resume", run / "checkpoints" / "step-00000003", *flags(after))
    resumed = ranks2.run(jobs.train, run, resume)[0]
    assert losses(resumed) == pytest.approx(losses(expected), rel=1e-5)


@slow
@pytest.mark.parametrize(
    ("level", "next_level", "tolerance"),
    [("fp16-O2", "fp32", 2e-3), ("fp32", "fp16-O2", 2e-3), ("fp16", "bf16-O2", 2e-2)],
)
def test_any_level_goes_on_from_any_other_with_the_weights_as_they_were_stepped(
    text, tmp_path, level, next_level, tolerance
):
    rows = jobs.train(tmp_path, ("--data", text, *TINY, "--steps", 4, "--precision", level))
    one_more_step = flags("--steps 5 --lr 1e-9 --ema 0.9")
    resume = ("--resume", tmp_path, "--precision", next_level, *one_more_step)
    resumed = jobs.train(tmp_path, resume)
    validation_loss = pytest.approx(rows[-1]["validation_loss"], rel=tolerance)
    assert resumed[-1]["validation_loss"] == validation_loss
    # The step at a learning rate of 1e-9 leaves the fp32 weights where the first run put them.
    stepped = weights(tmp_path, 4)
    torch.testing.assert_close(stepped, weights(tmp_path, 5), rtol=1e-6, atol=1e-8)
    # An average that starts with this step starts from the same weights.
    torch.testing.assert_close(stepped, weights(tmp_path, 5, "ema."), rtol=1e-6, atol=1e-8)
