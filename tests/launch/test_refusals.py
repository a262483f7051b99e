"""What cannot be done ends in one sentence and exit code 2, and leaves everything as it was."""

import itertools
import os
import socket
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from launch.config import Config
from launch.folder import begin, checkpoints_of
from launch.train import main
from launch.usage import flag
from tests.launch import jobs
from tests.launch.jobs import TINY

# What no value of a flag may be.
BAD = {
    "layers heads width block batch accumulate tp growth_interval": "0 -1 two 1.5",
    "steps log_every eval_every eval_examples save_every": "0 -1 two 1.5",
    "lr init_scale": "0 -1 nan inf x",
    "timeout": "0 -1 nan 3e6 x",
    "max_time": "0 -1 nan x",
    "workers replicate warmup keep": "-1 x 0.5",
    "seed": "-1 4294967296 x",
    "weight_decay clip": "-1 nan inf x",
    "dropout ema": "-0.1 1 nan x",
    "final_lr": "-0.1 1.1 nan x",
    "shard": "0 -2 3 x",
    "peak_tflops": "-1 nan x",
    "token_dtype": "int8 float32",
    "precision": "fp64 O4 half",
    "checkpoint_blocks": "some True",
    "schedule": "step cosinus",
    "hook": "int16 fp64 fp16 auto",  # the last two want several ranks
    "compile async_save overwrite auto_resume tensorboard": "yes 1",
    "model": "gtp hf: hf:gtp os:getcwd nowhere:f os:nothing :",
    "model_args": "width",
    "data": "nowhere nowhere:f os:nothing os:getcwd",
    "tokenizer": "nowhere.json",
    "device": "toaster cuda:7",
    "optimizer": "adam nowhere:X torch.optim:Nothing os:getcwd",
    "resume": "nowhere",
}
# What does not fit together, is not there, or is of another program.
WRONG = """
--width 17 | --heads 3 | --batch 6 --accumulate 4 | --accumulate 3 | --block 4000 | --batch 100000
--tp 2 | --replicate 2 | --shard 2 | --shard 2 --tp 2 | --replicate 2 --shard -1 | --tp 3 --shard -1
--optimizer muon --model tests.launch.test_refusals:no_blocks
--compile --model tests.launch.test_refusals:no_blocks
--checkpoint-blocks all --model tests.launch.test_refusals:no_blocks
--model tests.launch.test_refusals:frozen
--model tests.launch.test_refusals:no_blocks --model-args depth=3
--model hf:gpt2 --model-args n_head=0 | --optimizer torch.optim:LBFGS --schedule what
--layer 2 | --opt-level O1 | --strategy ddp | --comm-hook fp16 | --learning-rate 1 | --help-me
-lr 1 | train | --lr 1 2 | --lr=one | --resume nowhere --auto-resume | --precision
"""
# What a word that is nearly right is answered with.
NEAR = {"--precison fp16": "--precision", "--optimizer adam": "adamw", "--precision bf61": "bf16"}


def no_blocks(data: object) -> nn.Module:
    """A model whose outputs are no logits, and which has no blocks."""
    return nn.Embedding(data.classes, 4)


def frozen(data: object) -> nn.Module:
    return no_blocks(data).requires_grad_(False)


class Idle(nn.Sequential):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self[0](tokens)


def idle(data: object) -> nn.Module:
    return Idle(nn.Embedding(data.classes, data.classes), nn.Linear(2, 2, bias=False))


def wrong() -> Iterator[str]:
    for names, values in BAD.items():
        for name, value in itertools.product(names.split(), values.split()):
            yield f"{flag(name)} {value}"
    for name, field in Config.model_fields.items():  # no value at all
        if field.annotation is not bool and name != "model_args":
            yield flag(name)
    for line in WRONG.strip().splitlines():
        yield from line.split(" | ")


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The sentence with which a run is refused."""
    assert main([*map(str, args)]) == 2, args
    printed = capsys.readouterr().err
    assert printed.startswith("error: "), args
    assert printed.count("\n") == 1, args
    return printed


def test_each_of_two_hundred_wrong_flags_is_named(text, tmp_path, capsys):
    pytest.importorskip("transformers")
    given = ["--data", text, *TINY, "--run-dir", tmp_path / "run"]
    cases = [*wrong()]
    assert len(cases) >= 200
    for case in cases:
        words, said = case.replace("=", " ").split(), refused(capsys, *given, *case.split())
        assert words[0] in said or words[-1] in said, case
    for case, expected in NEAR.items():
        assert expected in refused(capsys, *given, *case.split()).removeprefix(f"error: {case}")
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_read_are_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    contents = {"odd.bin": b"123", "none.bin": b"", "short.txt": b"short", "tokenizer.json": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in ("empty", "odd.bin", "none.bin", "short.txt"):
        assert name in refused(capsys, "--data", tmp_path / name, "--run-dir", tmp_path / "run")
    words = ("--data", tmp_path / "short.txt", "--tokenizer", tmp_path / "tokenizer.json")
    assert "tokenizer.json" in refused(capsys, *words)


@pytest.mark.parametrize(
    "damage", ["another model", "a torn file", "no index", "no flags", "a second run", "a file"]
)
def test_what_cannot_go_on_is_named_and_nothing_is_lost(text, tmp_path, capsys, damage):
    args = ("--data", text, *TINY, "--steps", 2)
    jobs.train(tmp_path, args)
    (checkpoint,) = checkpoints_of(tmp_path)
    more = ["--resume", tmp_path, "--steps", "3"]
    if damage == "another model":
        more += ["--width", "32"]
    elif damage == "a torn file":
        file = next(checkpoint.glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "no index":
        (checkpoint / ".metadata").unlink()
    elif damage == "no flags":
        (tmp_path / "config.json").write_text("[]")
    else:
        below = "metrics.jsonl/run" if damage == "a file" else "."
        more = [*args, "--run-dir", tmp_path / below]
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert str(tmp_path) in refused(capsys, *more)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_loss_that_is_not_finite_ends_a_run_before_its_checkpoint(text, tmp_path, capsys):
    args = ("--data", text, *TINY, "--lr", "1e30", "--warmup", "0", "--steps", "5")
    assert "--lr" in refused(capsys, *args, "--run-dir", tmp_path)
    assert not checkpoints_of(tmp_path)


def test_ranks_leave_a_folder_alone_to_which_another_process_writes(ranks2, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 2, "--run-dir", tmp_path, "--overwrite")
    with begin(tmp_path, None):
        said = ranks2.run(jobs.refusal, *args)
    assert said[0] == said[1]
    assert f"process {os.getpid()} on {socket.gethostname()}" in said[0]
    assert ranks2.run(jobs.refusal, *args) == ["was not refused"] * 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--optimizer muon --shard 2", "--optimizer muon"),
        ("--hook fp16 --tp 2", "--hook"),
        (f"--model {__name__}:idle", "1.weight"),  # takes no part in what is returned
    ],
)
def test_ranks_refuse_alike(ranks2, text, tmp_path, args, named):
    said = ranks2.run(jobs.refusal, "--data", text, *TINY, "--run-dir", tmp_path, *args.split())
    assert said[0] == said[1]
    assert named in said[0]
