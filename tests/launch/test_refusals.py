"""What cannot be done ends in one sentence and exit code 2; and what people try first."""

import functools
import itertools
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pydantic import ValidationError
from torch import nn

from launch import checkpoint, sample
from launch.config import RENAMED_FLAGS, Config
from launch.folder import acquire_run_dir, list_checkpoints, remove_checkpoint
from launch.job import make_model
from launch.optim import make_optimizers
from launch.parallel import Layout
from launch.program import first_usage_error, flag, make_main, run_to_exit_code
from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import SHORT, TINY

# Runs and ranks that its tests share.
pytestmark = pytest.mark.xdist_group("launch refusals")

# What no value of a flag may be.
BAD = {
    "layers heads d_model seq_len global_batch_size accumulate": "0 -1 two 1.5",
    "tp growth_interval": "0 -1 two 1.5",
    "steps log_every eval_every eval_examples save_every": "0 -1 two 1.5",
    "lr init_scale": "0 -1 nan inf x",
    "timeout": "0 -1 nan 3e6 x 60 0s -1s 3000000s 1000h none 5d",
    "max_time": "0 -1 nan x 1.5 0m 1d s inf",
    "workers replicate warmup keep_checkpoints": "-1 x 0.5",
    "seed": "-1 4294967296 x",
    "weight_decay max_grad_norm": "-1 nan inf x",
    "dropout ema": "-0.1 1 nan x",
    "min_lr_ratio": "-0.1 1.1 nan x",
    "shard": "-2 x",
    "peak_tflops": "-1 nan x",
    "token_dtype": "int8 float32",
    "precision": "fp64 O4 half",
    "activation_checkpointing": "some True",
    "schedule": "step cosinus",
    "comm_hook": "int16 fp64 auto",
    "model": "gtp gpt2 hf: :",
    "optimizer": "adam",
}
# What it may be, but not here.
NOT_HERE = {
    "shard": "0 3",
    "comm_hook": "fp16 int8",  # they want several ranks
    "compile async_save overwrite auto_resume tensorboard": "yes 1",
    "model": "hf:gtp hf:owner/gpt2 os:getcwd nowhere:f os:nothing",
    "model_args": "width width=3",  # which gpt takes by flags
    "data": "nowhere nowhere:f os:nothing os:getcwd",
    "tokenizer": "nowhere.json",
    "device": "toaster cuda:7",
    "optimizer": "nowhere:X torch.optim:Nothing os:getcwd torch.optim:LBFGS",
    "resume": "nowhere",
}
# What does not fit together, is not there, or is of another program.
WRONG = """
--d-model 17 | --heads 5 | --global-batch-size 6 --accumulate 4 | --accumulate 3
--seq-len 4000 | --global-batch-size 100000
--tp 2 | --replicate 2 | --shard 2 | --shard 2 --tp 2 | --replicate 2 --shard -1 | --tp 3 --shard -1
--optimizer muon --model tests.launch.test_refusals:no_blocks
--compile --model tests.launch.test_refusals:no_blocks
--activation-checkpointing all --model tests.launch.test_refusals:no_blocks
--model tests.launch.test_refusals:frozen
--model tests.launch.test_refusals:no_blocks --model-args depth=3
--model hf:gpt2 --model-args n_head=0 | --model hf:gpt2 --model-args nlayer=2
--layer 2 | --opt-level O1 | --strategy ddp | --compression fp16 | --learning-rate 1 | --help-me
-lr 1 | train | --lr 1 2 | --lr=one | --resume nowhere --auto-resume | --precision | --lr | --data
--layers two | --lr nan | --schedule cosinus
"""
# What other programs call a flag, or a word that is nearly right; and what is answered.
NEAR = {
    "--learning-rate 1": "--lr",
    "--batch-size 8": "--global-batch-size",
    "--epochs 2": "--steps",
    "--max_steps=7": "--steps",
    "--block-size 8": "--seq-len",
    "--opt-level O1": "--precision",
    "--fp16": "--precision",
    "--gradient-accumulation-steps 2": "--accumulate",
    "--grad-clip 1": "--max-grad-norm",
    "--output-dir x": "--run-dir",
    "--precison fp16": "Did you mean --precision?",
    "--lerning-rate 1": "Did you mean --lr?",
    "--max_tim 90s": "Did you mean --max-time?",
    "--blok 16": "Did you mean --seq-len?",
    "--zzz 1": "--help lists every flag",
    "--optimizer adam": "adamw",
    "--precision bf61": "bf16",
    "--model hf:gtp2": "Did you mean gpt2",
    "--model hf:gpt2 --model-args nlayer=2": "Did you mean n_layer",
    "--model hf:gpt2 --model-args nlayer=2 nhead=2": "Did you mean n_layer, n_head?",
}


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
    for names, values in NOT_HERE.items():
        for name, value in itertools.product(names.split(), values.split()):
            yield f"{flag(name)} {value}"
    for line in WRONG.strip().splitlines():
        yield from line.split(" | ")


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The sentence with which a run is refused."""
    assert main([*map(str, args)]) == 2, args
    printed = capsys.readouterr().err
    assert printed.startswith("error: "), args
    assert printed.count("\n") == 1, args
    return printed


def test_values_that_a_flag_may_not_have_are_named():
    for names, values in BAD.items():
        for name, value in itertools.product(names.split(), values.split()):
            with pytest.raises(ValidationError) as raised:
                Config(**{name: value})
            assert str(first_usage_error(raised.value)).startswith(f"{flag(name)} {value}: ")


def test_each_wrong_flag_is_named(text, tmp_path, capsys):
    pytest.importorskip("transformers")
    given = ["--data", text, *SHORT, "--run-dir", tmp_path / "run"]
    for case in wrong():
        words, said = case.replace("=", " ").split(), refused(capsys, *given, *case.split())
        assert words[0] in said or words[-1] in said, case
    for case, expected in NEAR.items():
        assert expected in refused(capsys, *given, *case.split()).removeprefix(
            f"error: {case.split()[0]}"
        )
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_read_are_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    contents = {"odd.bin": b"123", "none.bin": b"", "short.txt": b"short", "tokenizer.json": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in ("empty", "odd.bin", "none.bin", "short.txt"):
        assert name in refused(capsys, "--data", tmp_path / name, "--run-dir", tmp_path / "run")
    assert "tokenizer.json" in refused(
        capsys, "--data", tmp_path / "short.txt", "--tokenizer", tmp_path / "tokenizer.json"
    )


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, of which tests take copies."""
    folder = tmp_path_factory.mktemp("trained")
    jobs.train(folder, ("--data", text, *TINY, "--steps", 2))
    return folder


# What became of a run, and what is then asked of it.
GO_ON = "--resume {run} --steps 3"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another model": (lambda run: None, f"{GO_ON} --d-model 32"),
    "another optimizer": (lambda run: None, f"{GO_ON} --optimizer sgd"),
    "a torn file": (lambda run: os.truncate(next(run.rglob("*.distcp")), 100), GO_ON),
    "no index": (lambda run: next(run.rglob(".metadata")).unlink(), GO_ON),
    "no flags": (lambda run: (run / "config.json").write_text("[]"), GO_ON),
    "a second run": (lambda run: None, "--data {text} --run-dir {run}"),
    "a file": (lambda run: None, "--data {text} --run-dir {run}/metrics.jsonl/run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_go_on_is_named_and_nothing_is_lost(text, trained, tmp_path, capsys, damage):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    spoil, asked = DAMAGES[damage]
    spoil(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert str(tmp_path) in refused(capsys, *asked.format(run=tmp_path, text=text).split())
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_loss_that_is_not_finite_ends_a_run_before_its_checkpoint(text, tmp_path, capsys):
    assert "--lr" in refused(
        *(capsys, "--data", text, *TINY, "--run-dir", tmp_path, "--steps", 5),
        *("--lr", "1e30", "--warmup", 0),
    )
    assert not list_checkpoints(tmp_path)


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Writing fails half-way, as on a full disk, until this is called: files end at 16 KiB."""
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    lift = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, hard))
    yield lift
    lift()


# In one process torch says so, from a thread of its own.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["--no-async-save", "--async-save"])
def test_on_a_full_disk_the_reason_is_the_last_word_and_no_half_checkpoint_stays(
    full_disk, text, tmp_path, capsys, monkeypatch, how
):
    args = ("--data", text, *TINY, "--steps", 2, "--save-every", 1, "--run-dir", tmp_path, how)
    assert refused(capsys, *args).endswith(" GiB are free)\n")
    assert [*(tmp_path / "checkpoints").iterdir()] == []
    # Where there is room again, the last one is written.

    def remove_and_make_room(folder: Path) -> None:
        remove_checkpoint(folder)
        full_disk()

    monkeypatch.setattr(checkpoint, "remove_checkpoint", remove_and_make_room)
    assert main([*map(str, args), "--overwrite"]) == 0
    assert "Warning: cannot write" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]


def test_a_new_checkpoint_stays_where_an_old_one_cannot_be_removed(
    text, tmp_path, capsys, monkeypatch
):
    save, old = dcp.save, tmp_path / "checkpoints" / "step-00000000"

    def and_leave_one(*given: Any, **named: Any) -> None:
        save(*given, **named)
        (old / ".metadata").mkdir(parents=True)  # no file, so it is not unlinked

    monkeypatch.setattr("torch.distributed.checkpoint.save", and_leave_one)
    assert "cannot remove" in refused(
        capsys, "--data", text, *TINY, "--steps", 1, "--keep-checkpoints", 1, "--run-dir", tmp_path
    )
    assert (old.parent / "step-00000001") in list_checkpoints(tmp_path)


def test_ranks_leave_a_folder_alone_to_which_another_process_writes(ranks2, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 2, "--run-dir", tmp_path, "--overwrite")
    with acquire_run_dir(tmp_path, None):
        said = ranks2.run(jobs.refusal, *args)
    assert said[0] == said[1]
    assert f"process {os.getpid()} on {socket.gethostname()}" in said[0]
    assert ranks2.run(jobs.refusal, *args) == ["was not refused"] * 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--optimizer muon --shard 2", "--optimizer muon"),
        ("--comm-hook fp16 --tp 2", "--comm-hook"),
        (f"--model {__name__}:idle", "1.weight"),  # takes no part in what is returned
    ],
)
def test_ranks_refuse_alike(ranks2, text, tmp_path, args, named):
    said = ranks2.run(jobs.refusal, "--data", text, *SHORT, "--run-dir", tmp_path, *args.split())
    assert said[0] == said[1]
    assert named in said[0]


# -- what people try first -------------------------------------------------------------------------


def test_betas_eps_and_weight_decay_reach_the_optimizer():
    config = Config(beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.3)
    groups = make_optimizers(torch.nn.Linear(2, 2), config)[0].param_groups
    found = [(group["betas"], group["eps"], group["weight_decay"]) for group in groups]
    assert found == [((0.8, 0.99), 1e-6, 0.3), ((0.8, 0.99), 1e-6, 0.0)]  # of biases no decay


# A module of the user's own, whose functions go wrong inside.
MINE = """
import torch

def data():
    return [][0]

def pairs():
    return [(torch.zeros(2), 0)] * 8, [(torch.zeros(2), 0)], 2

def model(data):
    return torch.nn.Linear(2, "two")

class Wrong(torch.nn.Linear):
    def __init__(self, data):
        super().__init__(2, 2)
    def forward(self, x):
        return super().forward(x.reshape(3, 5))
"""


@pytest.mark.parametrize(
    ("flags", "line", "error"),
    [
        ("--data mine:data", 5, "IndexError"),
        ("--data mine:pairs --model mine:model", 11, "TypeError"),
        ("--data mine:pairs --model mine:Wrong", 17, "RuntimeError"),
        ("--data broken:data", 1, "ZeroDivisionError"),
    ],
)
def test_error_of_ones_own_names_its_line_and_keeps_its_traceback(
    tmp_path, monkeypatch, capsys, flags, line, error
):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    # What is raised again, Python prints with its traceback, and exits with 1.
    with pytest.raises((LookupError, TypeError, RuntimeError, ArithmeticError)) as raised:
        main([*map(str, SHORT), *flags.split(), "--run-dir", str(tmp_path / "run")])
    assert type(raised.value).__name__ == error
    (first,) = capsys.readouterr().err.splitlines()
    file = flags.split()[-1].partition(":")[0] if "broken" in flags else "mine"
    assert first.startswith(f"error in {tmp_path / file}.py, line {line}: {error}")


@pytest.mark.parametrize(
    ("source", "line", "error"),
    [
        ("x = 1\ndef data(:\n", 2, "SyntaxError"),
        ("def data():\nreturn 1\n", 2, "IndentationError"),
        ("\nimport no_such_module_at_all\n", 2, "ModuleNotFoundError"),
        ("\nfrom os import no_such_name\n", 2, "ImportError"),
        ("\n\nraise ValueError('mine')\n", 3, "ValueError"),
        ("import torch\ntorch.no_such_name\n", 2, "AttributeError"),
    ],
)
@pytest.mark.parametrize("flag", ["--data", "--model"])
def test_a_file_that_raises_at_import_is_named_with_its_line(
    tmp_path, monkeypatch, capsys, text, flag, source, line, error
):
    (tmp_path / "raising.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = () if flag == "--data" else ("--data", str(text))
    kinds = (SyntaxError, ImportError, ValueError, AttributeError)
    with pytest.raises(kinds):
        main([*data, *map(str, SHORT), flag, "raising:f", "--run-dir", str(tmp_path / "run")])
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"error in {tmp_path}/raising.py, line {line}: {error}")


@pytest.mark.parametrize("flag", ["--data", "--model", "--optimizer"])
def test_a_module_that_is_not_found_is_answered_with_the_folders_that_were_searched(
    tmp_path, monkeypatch, capsys, text, flag
):
    """As of a run that was started from another folder than that of the file."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine_alone.py").write_text("")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine_alone", raising=False)
    data = () if flag == "--data" else ("--data", text)
    said = refused(capsys, *data, *SHORT, flag, "mine_alone:f", "--run-dir", tmp_path / "run")
    assert said.startswith(f"error: {flag} mine_alone:f: there is no module mine_alone. Looked for")
    assert f"{tmp_path}/elsewhere" in said
    assert "Start the run from the folder that holds mine_alone, or add that folder to" in said
    (tmp_path / "elsewhere" / "mine_alone.py").write_text("def function(): ...\n")
    said = refused(
        capsys, *data, *SHORT, flag, "mine_alone:functoin", "--run-dir", tmp_path / "run"
    )
    assert f"mine_alone, which is {tmp_path}/elsewhere/mine_alone.py, has no functoin" in said
    assert "Did you mean function?" in said


def test_ctrl_c_before_the_first_step_is_one_line(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert (run_to_exit_code(interrupted), capsys.readouterr().err.count("\n")) == (130, 1)


def test_a_reader_that_has_seen_enough_ends_a_program_without_a_word():
    reader, pipe = os.pipe()
    os.close(reader)
    with (
        os.fdopen(pipe, "w") as closed,
        redirect_stdout(closed),
        pytest.raises(SystemExit, match="141"),
    ):
        make_main("name", lambda: print("text"))([])


def test_dry_run_in_one_process_names_the_ranks_that_the_run_needs(text, tmp_path, capsys):
    given = [*map(str, ("--data", text, *TINY)), "--run-dir", str(tmp_path / "run"), "--dry-run"]
    assert main([*given, "--shard", "2", "--tp", "2"]) == 0
    printed = capsys.readouterr().out
    assert "these flags can run on 4 ranks" in printed
    assert "Start it with torchrun --nproc-per-node 4 to also check DDP" in printed
    assert "--heads" in refused(capsys, *given, "--heads", 3)
    assert "closure" in refused(capsys, *given, "--optimizer", "torch.optim:LBFGS")
    assert not (tmp_path / "run").exists()


def half(data: object) -> nn.Module:
    """A model that trains half-precision parameters, as an adapter over a half base may."""
    return Idle(nn.Embedding(data.classes, data.classes)).bfloat16()


@pytest.mark.parametrize(
    "flags",
    [
        f"--model {__name__}:half --precision bf16",
        f"--model {__name__}:half --precision fp16",
        f"--compile --model {__name__}:no_blocks",
    ],
)
def test_dry_run_refuses_with_the_message_of_the_run(text, tmp_path, capsys, flags):
    given = ["--data", text, *SHORT, "--run-dir", tmp_path / "run", *flags.split()]
    assert refused(capsys, *given, "--dry-run") == refused(capsys, *given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "level", ["fp32", "fp16", "fp16-O2", "fp16-O3", "bf16", "bf16-O2", "bf16-O3"]
)
@pytest.mark.parametrize("ranks", ["", "--shard 2", "--tp 2", "--replicate 2 --comm-hook int8"])
def test_dry_run_accepts_every_level_on_every_layout(text, tmp_path, capsys, level, ranks):
    given = [*map(str, ("--data", text, *TINY)), "--run-dir", str(tmp_path / "run"), "--dry-run"]
    assert main([*given, "--precision", level, *ranks.split()]) == 0, capsys.readouterr().err
    assert "these flags can run" in capsys.readouterr().out


def on_ranks(*args: object) -> tuple[int, str]:
    """The exit code of this rank, and what it printed."""
    with jobs.here() as printed:
        code = main([*map(str, args)])
    return code, printed.getvalue()


def test_dry_run_on_the_ranks_of_the_run_starts_it_whole_and_writes_nothing(ranks2, text, tmp_path):
    args = ("--data", text, *TINY, "--shard", 2, "--precision", "bf16-O2", "--dry-run")
    first, second = ranks2.run(on_ranks, *args, "--run-dir", tmp_path / "run")
    assert first[0] == 0
    assert second == (0, "")
    assert "these flags can run on 2 ranks" in first[1]
    assert "built the model gpt on every rank" in first[1]
    assert "called initialize at precision bf16-O2" in first[1]
    assert "evaluated the model on one held-out example" in first[1]
    assert "torchrun" not in first[1]
    assert not (tmp_path / "run").exists()


def test_dry_run_on_the_ranks_of_the_run_refuses_what_only_ranks_can_find(ranks2, text, tmp_path):
    """DDP finds a parameter that takes no part in the outputs."""
    args = ("--data", text, *SHORT, "--model", f"{__name__}:idle", "--run-dir", tmp_path / "run")
    dry, real = (ranks2.run(jobs.refusal, *args, *more) for more in (("--dry-run",), ()))
    assert dry == real
    assert "1.weight" in dry[0]


def test_dry_run_reads_the_checkpoint_that_the_run_would_resume(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    args = ("--resume", tmp_path, "--steps", 3, "--dry-run")
    assert main([*map(str, args)]) == 0
    assert f"read the checkpoint {tmp_path}/checkpoints/step-00000002" in capsys.readouterr().out
    os.truncate(next(tmp_path.rglob("*.distcp")), 100)
    assert "damaged" in refused(capsys, *args)


# Values that a flag does not take, with a part of the message for each.
MESSAGES = {
    "--precision int4": "there is no such precision level. Choose fp32, fp16,",
    "--precision bf61": "Did you mean bf16?",
    "--optimizer adam": "there is no such optimizer. Choose adamw, sgd, muon, or module:Class. "
    "Did you mean adamw?",
    "--schedule cosinus": "there is no such choice. Choose cosine, wsd, linear or constant. Did "
    "you mean cosine?",
    "--lr abc": "this is not a number. Give one such as 0.5 or 1e-3.",
    "--lr 0": "the number is too small. Give one above 0.",
    "--lr inf": "the number is not finite. Give a finite one.",
    "--layers 1.5": "this is not a whole number. Give one such as 4.",
    "--shard -2": "the number is too small. Give -1 or more.",
    "--dropout 1": "the number is too large. Give one below 1.",
    "--min-lr-ratio 2": "the number is too large. Give 1 or less.",
    "--model gpt2": "the built-in model is called gpt, and every other model has a colon in its "
    "name. Write hf:gpt2 for a model type or a folder of transformers, or module:function for "
    "your own model.",
    "--model-args width": "the value is missing. Write width=VALUE.",
    "--timeout 60": "the unit is missing. Write 60s for seconds, which a plain number meant "
    "before, or 60m for minutes.",
    "--max-time 1.5": "the unit is missing. Write 1.5m for minutes, which a plain number meant "
    "before, or 1.5s for seconds.",
    "--timeout 5d": "this is not a duration. Write one such as 90s, 10m or 2h.",
    "--timeout 1000h": "a duration must be longer than 0s and at most 2000000s.",
    "--max-time 0m": "a duration must be longer than 0s.",
}


@pytest.mark.parametrize("flags", MESSAGES)
def test_message_for_a_wrong_value_has_the_reason_and_the_cure(capsys, flags):
    message = refused(capsys, *flags.split())
    assert message.startswith(f"error: {flags}: ")
    assert MESSAGES[flags] in message


@pytest.mark.parametrize("name", RENAMED_FLAGS)
def test_former_name_of_a_flag_is_answered_with_the_present_name(capsys, name):
    message = refused(capsys, flag(name), 1)
    present = flag(RENAMED_FLAGS[name])
    assert message == f"error: {flag(name)}: this flag was renamed. Write {present}.\n"


def test_flag_of_another_program_is_answered_with_the_name_here(capsys):
    message = refused(capsys, "--batch-size", 8)
    assert message == (
        "error: --batch-size: there is no such flag. It is called --global-batch-size here.\n"
    )


def test_misspelt_flag_of_sample_is_answered_with_the_right_one(capsys):
    assert sample.main(["runs/nowhere", "--tokns", "5"]) == 2
    assert "there is no such flag. Did you mean --tokens?" in capsys.readouterr().err


@pytest.mark.parametrize("model", [f"{__name__}:no_blocks", "hf:gpt2"])
def test_flag_that_only_gpt_reads_is_refused_for_another_model(capsys, model):
    assert refused(capsys, "--model", model, "--d-model", 128) == (
        f"error: --d-model 128: only the built-in gpt reads this, and --model is {model}. Leave "
        "it out, or give arguments of your model by --model-args name=value.\n"
    )


def test_flag_that_only_gpt_reads_is_refused_on_resume_of_another_model(text, tmp_path, capsys):
    own = ("--model", f"{__name__}:eager", "--data", text, *SHORT, "--steps", 1)
    jobs.train(tmp_path, own)
    message = refused(capsys, "--resume", tmp_path, "--steps", 2, "--d-model", 128)
    assert message.startswith("error: --d-model 128: only the built-in gpt reads this")


@pytest.mark.parametrize("value", ["int4", "it", "be", "must", "x"])
@pytest.mark.parametrize("name", ["precision", "optimizer", "schedule", "comm_hook", "model"])
def test_a_hint_is_a_value_that_the_flag_takes(value, name):
    with pytest.raises(ValidationError) as raised:
        Config(**{name: value})
    _, asks, hint = str(first_usage_error(raised.value)).partition(" Did you mean ")
    if asks:
        Config(**{name: hint.removesuffix("?")})
    assert not asks or name == "comm_hook"  # int8 is written like int4


def test_weights_of_a_tensor_depend_on_its_name_alone():
    small, large = (
        make_model(Config(layers=layers), _Classes(), Layout(), torch.device("cpu"))
        for layers in (1, 2)
    )
    of_large = dict(large.named_parameters())
    for name, weight in small.named_parameters():
        alike = weight.equal(of_large[name])
        assert alike or name.endswith(("attention_out.weight", "feed_out.weight")), name
    assert not of_large["blocks.0.qkv.weight"].equal(of_large["blocks.1.qkv.weight"])


def eager(data: object) -> torch.nn.Module:
    """A model that leaves the region for its products."""

    class Eager(torch.nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(tokens) @ torch.eye(256)

    return Eager(256, 256)


def test_violation_of_the_first_step_is_a_warning_with_its_fix(text, tmp_path, capsys):
    args = [*map(str, ("--data", text, *SHORT)), "--steps", "2", "--precision", "bf16", "--run-dir"]
    args += [str(tmp_path), "--model", f"{__name__}:eager", "--keep-checkpoints", "0"]
    assert main(args) == 0
    said = capsys.readouterr().out
    assert "Warning: --precision bf16: compute: declared bf16, found fp32" in said
    assert "fix:" in said
    assert (tmp_path / "precision.txt").read_text().startswith("1 violation")
    assert main([*args, "--no-check-precision", "--overwrite"]) == 0
    assert "Warning" not in capsys.readouterr().out


def test_precision_of_a_file_pins_modules_and_goes_along_with_the_run(text, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text('level = "bf16"\n[modules]\n"head" = "fp32"\n')
    args = ("--data", text, *TINY, "--steps", 2, "--precision", file)
    rows = jobs.train(tmp_path / "run", args)
    assert rows != jobs.train(tmp_path / "plain", (*args[:-1], "bf16"))
    file.unlink()
    again = jobs.train(tmp_path / "run", ("--resume", tmp_path / "run", "--steps", 3))
    assert again[-1]["step"] == 3
    given = [*map(str, ("--data", text, *TINY)), "--run-dir", str(tmp_path / "no"), "--precision"]
    bad = [
        'level = "bf17"',
        "level =",
        "",
        '[modules]\n"head" = "fp32"',
        'level = "bf16"\n[module]',
    ]
    for content in (*bad, 'level = "bf16"\n[modules]\n"haed" = "fp32"'):
        (tmp_path / "bad.toml").write_text(content)
        assert "bad.toml" in refused(capsys, *given, tmp_path / "bad.toml")


class _Classes:
    classes = 256
