"""The launcher refuses a run in one sentence with exit code 2, and answers frequent mistakes."""

import functools
import itertools
import os
import resource
import shutil
import socket
import sys
import tomllib
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
from tests.quick_cases import quick_cases

# The tests share runs and ranks.
pytestmark = pytest.mark.xdist_group("launch refusals")

FLAGS = tomllib.loads(Path(__file__).with_name("wrong_flags.toml").read_text())
BAD_VALUES = FLAGS["bad_values"]
HINTS = FLAGS["hints"]
WRONG_FLAGS = FLAGS["wrong_flags"]
# The import of transformers takes seconds.
QUICK_WRONG_FLAGS = [flags for flags in WRONG_FLAGS if "hf:" not in flags]
QUICK_HINTS = [hint for hint in HINTS.items() if "hf:" not in hint[0]]
MESSAGES = FLAGS["messages"]


def no_blocks(data: object) -> nn.Module:
    """Return a model without blocks, which returns embeddings instead of logits."""
    return nn.Embedding(data.classes, 4)


def frozen(data: object) -> nn.Module:
    """Return a model without trainable parameters."""
    return no_blocks(data).requires_grad_(False)


class Idle(nn.Sequential):
    """A model that leaves the parameters of its later layers out of its outputs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self[0](tokens)


def idle(data: object) -> nn.Module:
    return Idle(nn.Embedding(data.classes, data.classes), nn.Linear(2, 2, bias=False))


def call_main(*args: object) -> int:
    """Call the launcher with these flags, and return its exit code."""
    return main([str(arg) for arg in args])


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Return the line with which the launcher refuses a run, which must exit with 2."""
    assert call_main(*args) == 2, args
    printed = capsys.readouterr().err
    assert printed.startswith("error: "), args
    assert printed.count("\n") == 1, args
    return printed


@pytest.mark.parametrize(("names", "values"), BAD_VALUES.items(), ids=BAD_VALUES)
def test_values_that_a_flag_may_not_have_are_named(names, values):
    for name, value in itertools.product(names.split(), values.split()):
        with pytest.raises(ValidationError) as raised:
            Config(**{name: value})
        message = str(first_usage_error(raised.value))
        assert message.startswith(f"{flag(name)} {value}: ")


@pytest.mark.parametrize("flags", quick_cases(WRONG_FLAGS, QUICK_WRONG_FLAGS))
def test_each_wrong_flag_is_named(text, tmp_path, capsys, flags):
    if "hf:" in flags:
        pytest.importorskip("transformers")
    base = ("--data", text, *SHORT, "--run-dir", tmp_path / "run")
    message = refused(capsys, *base, *flags.split())
    words = flags.replace("=", " ").split()
    assert words[0] in message or words[-1] in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "answer"),
    quick_cases(HINTS.items(), QUICK_HINTS),
    ids=HINTS,
)
def test_wrong_flag_is_answered_with_the_right_one(text, tmp_path, capsys, flags, answer):
    if "hf:" in flags:
        pytest.importorskip("transformers")
    base = ("--data", text, *SHORT, "--run-dir", tmp_path / "run")
    message = refused(capsys, *base, *flags.split())
    # The name of the wrong flag is not part of the answer.
    wrong_flag = flags.split()[0]
    assert answer in message.removeprefix(f"error: {wrong_flag}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("odd.bin", b"123"), ("none.bin", b""), ("short.txt", b"short"), ("empty", None)],
)
def test_data_that_cannot_be_read_are_named(tmp_path, capsys, name, content):
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert name in refused(capsys, "--data", path, "--run-dir", tmp_path / "run")


def test_tokenizer_that_cannot_be_read_is_named(text, tmp_path, capsys):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    message = refused(capsys, "--data", text, "--tokenizer", tokenizer)
    assert "tokenizer.json" in message


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, which tests copy."""
    folder = tmp_path_factory.mktemp("trained")
    jobs.train(folder, ("--data", text, *TINY, "--steps", 2))
    return folder


def truncate_tensors(run: Path) -> None:
    """Cut off a file of tensors in the checkpoint of a run."""
    os.truncate(next(run.rglob("*.distcp")), 100)


def remove_index(run: Path) -> None:
    """Remove the index of the checkpoint of a run."""
    next(run.rglob(".metadata")).unlink()


def spoil_flags(run: Path) -> None:
    """Replace the flags that a run has saved."""
    (run / "config.json").write_text("[]")


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the contents of all files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("damage", "flags"),
    [
        pytest.param(None, "--resume {run} --steps 3 --d-model 32", id="another model"),
        pytest.param(None, "--resume {run} --steps 3 --optimizer sgd", id="another optimizer"),
        pytest.param(truncate_tensors, "--resume {run} --steps 3", id="a torn file"),
        pytest.param(remove_index, "--resume {run} --steps 3", id="no index"),
        pytest.param(spoil_flags, "--resume {run} --steps 3", id="no flags"),
        pytest.param(None, "--data {text} --run-dir {run}", id="a second run"),
        pytest.param(None, "--data {text} --run-dir {run}/metrics.jsonl/run", id="a file"),
    ],
)
def test_what_cannot_go_on_is_named_and_nothing_is_lost(
    text, trained, tmp_path, capsys, damage, flags
):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    if damage is not None:
        damage(tmp_path)
    files = read_files(tmp_path)
    message = refused(capsys, *flags.format(run=tmp_path, text=text).split())
    assert str(tmp_path) in message
    assert read_files(tmp_path) == files


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_a_run_before_its_checkpoint(text, tmp_path, capsys):
    args = ("--data", text, *TINY, "--run-dir", tmp_path, "--steps", 5)
    message = refused(capsys, *args, "--lr", "1e30", "--warmup", 0)
    assert "--lr" in message
    assert not list_checkpoints(tmp_path)


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """A full disk, and the function that makes room on it.

    A limit of 16 KiB for a file stands for the full disk, so that writing fails half-way.
    """
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard_limit))
    make_room = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, hard_limit))
    yield make_room
    make_room()


@pytest.mark.slow
# torch warns in one process, from a thread of its own.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save_mode", ["--no-async-save", "--async-save"])
def test_on_a_full_disk_the_reason_is_the_last_word_and_no_half_checkpoint_stays(
    full_disk, text, tmp_path, capsys, monkeypatch, save_mode
):
    steps = ("--steps", 2, "--save-every", 1)
    args = ("--data", text, *TINY, *steps, "--run-dir", tmp_path, save_mode)
    assert refused(capsys, *args).endswith(" GiB are free)\n")
    assert list((tmp_path / "checkpoints").iterdir()) == []

    def remove_and_make_room(folder: Path) -> None:
        remove_checkpoint(folder)
        full_disk()

    # Once the disk has room again, the run goes on and writes its last checkpoint.
    monkeypatch.setattr(checkpoint, "remove_checkpoint", remove_and_make_room)
    assert call_main(*args, "--overwrite") == 0
    assert "Warning: cannot write" in capsys.readouterr().out
    (last_checkpoint,) = list_checkpoints(tmp_path)
    assert last_checkpoint.name == "step-00000002"


@pytest.mark.slow
def test_a_new_checkpoint_stays_where_an_old_one_cannot_be_removed(
    text, tmp_path, capsys, monkeypatch
):
    save = dcp.save
    checkpoints = tmp_path / "checkpoints"

    def save_beside_an_old_checkpoint(*args: Any, **options: Any) -> None:
        save(*args, **options)
        # An index that is a folder cannot be unlinked.
        (checkpoints / "step-00000000" / ".metadata").mkdir(parents=True)

    monkeypatch.setattr("torch.distributed.checkpoint.save", save_beside_an_old_checkpoint)
    flags = ("--steps", 1, "--keep-checkpoints", 1, "--run-dir", tmp_path)
    message = refused(capsys, "--data", text, *TINY, *flags)
    assert "cannot remove" in message
    assert checkpoints / "step-00000001" in list_checkpoints(tmp_path)


def test_ranks_leave_a_folder_alone_to_which_another_process_writes(ranks2, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 2, "--run-dir", tmp_path, "--overwrite")
    with acquire_run_dir(tmp_path, None):
        first, second = ranks2.run(jobs.refusal, *args)
    assert first == second
    assert f"process {os.getpid()} on {socket.gethostname()}" in first
    assert ranks2.run(jobs.refusal, *args) == ["was not refused"] * 2


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        pytest.param("--optimizer muon --shard 2", "--optimizer muon", id="muon on shards"),
        pytest.param("--comm-hook fp16 --tp 2", "--comm-hook", id="hook with tensor parallel"),
        pytest.param(f"--model {__name__}:idle", "1.weight", id="unused parameter"),
    ],
)
def test_ranks_refuse_alike(ranks2, text, tmp_path, flags, culprit):
    args = ("--data", text, *SHORT, "--run-dir", tmp_path, *flags.split())
    first, second = ranks2.run(jobs.refusal, *args)
    assert first == second
    assert culprit in first


# -- frequent mistakes of newcomers ----------------------------------------------------------------


def test_betas_eps_and_weight_decay_reach_the_optimizer():
    config = Config(beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.3)
    (optimizer, *_) = make_optimizers(nn.Linear(2, 2), config)
    weight_group, bias_group = optimizer.param_groups
    for group in (weight_group, bias_group):
        assert group["betas"] == (0.8, 0.99)
        assert group["eps"] == 1e-6
    assert weight_group["weight_decay"] == 0.3
    assert bias_group["weight_decay"] == 0.0


# A user's module with functions that raise errors.
USER_MODULE = """
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


def flags_with_data(text: Path, flag: str, value: str) -> tuple[object, ...]:
    """Return the flags of a short run on a text, unless the flag itself names the data."""
    if flag == "--data":
        return (*SHORT, flag, value)
    return (*SHORT, flag, value, "--data", text)


def write_user_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two modules with errors, and make the folder the place that Python imports from."""
    (folder / "mine.py").write_text(USER_MODULE)
    (folder / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)


@pytest.mark.parametrize(
    ("flags", "place", "error"),
    [
        pytest.param("--data mine:data", "mine.py, line 5", IndexError, id="data function"),
        pytest.param(
            "--data mine:pairs --model mine:model", "mine.py, line 11", TypeError, id="model"
        ),
        pytest.param(
            "--data mine:pairs --model mine:Wrong", "mine.py, line 17", RuntimeError, id="forward"
        ),
        pytest.param("--data broken:data", "broken.py, line 1", ZeroDivisionError, id="import"),
    ],
)
def test_error_of_a_user_names_its_line_and_keeps_its_traceback(
    tmp_path, monkeypatch, capsys, flags, place, error
):
    write_user_modules(tmp_path, monkeypatch)
    # Python prints an error that is raised again with its traceback, and exits with 1.
    with pytest.raises(error) as raised:
        call_main(*SHORT, *flags.split(), "--run-dir", tmp_path / "run")
    assert raised.type is error
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error in {tmp_path}/{place}: {error.__name__}")


@pytest.mark.parametrize(
    ("source", "line", "error"),
    [
        ("x = 1\ndef data(:\n", 2, SyntaxError),
        ("def data():\nreturn 1\n", 2, IndentationError),
        ("\nimport no_such_module_at_all\n", 2, ModuleNotFoundError),
        ("\nfrom os import no_such_name\n", 2, ImportError),
        ("\n\nraise ValueError('mine')\n", 3, ValueError),
        ("import torch\ntorch.no_such_name\n", 2, AttributeError),
    ],
)
@pytest.mark.parametrize("flag", ["--data", "--model"])
def test_a_file_that_raises_at_import_is_named_with_its_line(
    tmp_path, monkeypatch, capsys, text, flag, source, line, error
):
    (tmp_path / "raising.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    args = flags_with_data(text, flag, "raising:f")
    with pytest.raises(error):
        call_main(*args, "--run-dir", tmp_path / "run")
    first_line = capsys.readouterr().err.splitlines()[0]
    assert first_line.startswith(f"error in {tmp_path}/raising.py, line {line}: {error.__name__}")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is not the folder that holds the user's module."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "mine_alone.py").write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_alone", raising=False)
    return folder


@pytest.mark.parametrize("flag", ["--data", "--model", "--optimizer"])
def test_a_module_that_is_not_found_is_answered_with_the_folders_that_were_searched(
    elsewhere, tmp_path, capsys, text, flag
):
    args = flags_with_data(text, flag, "mine_alone:f")
    message = refused(capsys, *args, "--run-dir", tmp_path / "run")
    start = f"error: {flag} mine_alone:f: there is no module mine_alone. Looked for"
    assert message.startswith(start)
    assert str(elsewhere) in message
    advice = "Start the run from the folder that holds mine_alone, or add that folder to"
    assert advice in message


@pytest.mark.parametrize("flag", ["--data", "--model", "--optimizer"])
def test_a_function_that_is_not_found_is_answered_with_the_file_and_a_similar_name(
    elsewhere, tmp_path, capsys, text, flag
):
    (elsewhere / "mine_alone.py").write_text("def function(): ...\n")
    args = flags_with_data(text, flag, "mine_alone:functoin")
    message = refused(capsys, *args, "--run-dir", tmp_path / "run")
    assert f"mine_alone, which is {elsewhere}/mine_alone.py, has no functoin" in message
    assert "Did you mean function?" in message


def test_ctrl_c_before_the_first_step_is_one_line(capsys):
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert run_to_exit_code(interrupt) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_has_seen_enough_ends_a_program_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    program = make_main("name", lambda: print("text"))
    with (
        os.fdopen(writer, "w") as closed_pipe,
        redirect_stdout(closed_pipe),
        pytest.raises(SystemExit, match="141"),
    ):
        program([])


# -- dry runs --------------------------------------------------------------------------------------


def test_dry_run_in_one_process_names_the_ranks_that_the_run_needs(text, tmp_path, capsys):
    args = ("--data", text, *TINY, "--run-dir", tmp_path / "run", "--dry-run")
    assert call_main(*args, "--shard", "2", "--tp", "2") == 0
    printed = capsys.readouterr().out
    assert "these flags can run on 4 ranks" in printed
    assert "Start it with torchrun --nproc-per-node 4 to also check DDP" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "reason"), [("--heads 3", "--heads"), ("--optimizer torch.optim:LBFGS", "closure")]
)
def test_dry_run_refuses_wrong_flags(text, tmp_path, capsys, flags, reason):
    args = ("--data", text, *TINY, "--run-dir", tmp_path / "run", "--dry-run")
    assert reason in refused(capsys, *args, *flags.split())
    assert not (tmp_path / "run").exists()


def half(data: object) -> nn.Module:
    """Return a model with trainable parameters in half precision, as adapters may have."""
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
    args = ("--data", text, *SHORT, "--run-dir", tmp_path / "run", *flags.split())
    dry_message = refused(capsys, *args, "--dry-run")
    message = refused(capsys, *args)
    assert dry_message == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "level",
    [
        "fp32",
        "fp16",
        "bf16-O2",
        pytest.param("fp16-O2", marks=pytest.mark.slow),
        pytest.param("fp16-O3", marks=pytest.mark.slow),
        pytest.param("bf16", marks=pytest.mark.slow),
        pytest.param("bf16-O3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("layout", ["", "--shard 2", "--tp 2", "--replicate 2 --comm-hook int8"])
def test_dry_run_accepts_every_level_on_every_layout(text, tmp_path, capsys, level, layout):
    args = ("--data", text, *TINY, "--run-dir", tmp_path / "run", "--dry-run")
    code = call_main(*args, "--precision", level, *layout.split())
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "these flags can run" in printed.out


def call_main_on_rank(*args: object) -> tuple[int, str]:
    """Return the exit code of this rank and the text that it printed."""
    with jobs.pool_rank() as printed:
        code = call_main(*args)
    return code, printed.getvalue()


def test_dry_run_on_the_ranks_of_the_run_starts_it_whole_and_writes_nothing(ranks2, text, tmp_path):
    flags = ("--shard", 2, "--precision", "bf16-O2", "--dry-run")
    args = ("--data", text, *TINY, *flags, "--run-dir", tmp_path / "run")
    (code, printed), second_rank = ranks2.run(call_main_on_rank, *args)
    assert code == 0
    assert second_rank == (0, "")
    assert "these flags can run on 2 ranks" in printed
    assert "built the model gpt on every rank" in printed
    assert "called initialize at precision bf16-O2" in printed
    assert "evaluated the model on one held-out example" in printed
    assert "torchrun" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_dry_run_on_the_ranks_of_the_run_refuses_what_only_ranks_can_find(ranks2, text, tmp_path):
    """DDP finds a parameter that the outputs do not depend on."""
    args = ("--data", text, *SHORT, "--model", f"{__name__}:idle", "--run-dir", tmp_path / "run")
    messages = ranks2.run(jobs.refusal, *args, "--dry-run")
    assert messages == ranks2.run(jobs.refusal, *args)
    assert "1.weight" in messages[0]


def test_dry_run_reads_the_checkpoint_that_the_run_would_resume(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    args = ("--resume", tmp_path, "--steps", 3, "--dry-run")
    assert call_main(*args) == 0
    assert f"read the checkpoint {tmp_path}/checkpoints/step-00000002" in capsys.readouterr().out
    truncate_tensors(tmp_path)
    assert "damaged" in refused(capsys, *args)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "reason"), MESSAGES.items(), ids=MESSAGES)
def test_message_for_a_wrong_value_has_the_reason_and_the_cure(capsys, flags, reason):
    message = refused(capsys, *flags.split())
    assert message.startswith(f"error: {flags}: ")
    assert reason in message


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
    message = refused(capsys, "--model", model, "--d-model", 128)
    assert message == (
        f"error: --d-model 128: only the built-in gpt reads this, and --model is {model}. Leave "
        "it out, or give arguments of your model by --model-args name=value.\n"
    )


def test_flag_that_only_gpt_reads_is_refused_on_resume_of_another_model(text, tmp_path, capsys):
    args = ("--model", f"{__name__}:eager", "--data", text, *SHORT, "--steps", 1)
    jobs.train(tmp_path, args)
    message = refused(capsys, "--resume", tmp_path, "--steps", 2, "--d-model", 128)
    assert message.startswith("error: --d-model 128: only the built-in gpt reads this")


@pytest.mark.parametrize("value", ["int4", "it", "be", "must", "x"])
@pytest.mark.parametrize("name", ["precision", "optimizer", "schedule", "comm_hook", "model"])
def test_a_hint_is_a_value_that_the_flag_takes(value, name):
    with pytest.raises(ValidationError) as raised:
        Config(**{name: value})
    message = str(first_usage_error(raised.value))
    _, has_hint, hint = message.partition(" Did you mean ")
    if has_hint:
        # The only similar name among these values is int8, for int4.
        assert name == "comm_hook"
        Config(**{name: hint.removesuffix("?")})


# -- models ----------------------------------------------------------------------------------------


class TextData:
    """Data of 256 different tokens."""

    classes = 256


def make_gpt(layers: int) -> dict[str, nn.Parameter]:
    """Return the parameters of the built-in model by name."""
    model = make_model(Config(layers=layers), TextData(), Layout(), torch.device("cpu"))
    return dict(model.named_parameters())


def test_weights_of_a_tensor_depend_on_its_name_alone():
    small = make_gpt(layers=1)
    large = make_gpt(layers=2)
    for name, weight in small.items():
        # The number of layers scales the weights at the end of each branch.
        if not name.endswith(("attention_out.weight", "feed_out.weight")):
            assert weight.equal(large[name]), name
    assert not large["blocks.0.qkv.weight"].equal(large["blocks.1.qkv.weight"])


class Eager(nn.Embedding):
    """A model that leaves the autocast region for its products."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(tokens) @ torch.eye(256)


def eager(data: object) -> nn.Module:
    """Return a model that does not compute in the precision of its level."""
    return Eager(256, 256)


@pytest.mark.slow
def test_violation_of_the_first_step_is_a_warning_with_its_fix(text, tmp_path, capsys):
    flags = ("--steps", 2, "--precision", "bf16", "--keep-checkpoints", 0)
    model = ("--model", f"{__name__}:eager")
    args = ("--data", text, *SHORT, *flags, *model, "--run-dir", tmp_path)
    assert call_main(*args) == 0
    printed = capsys.readouterr().out
    assert "Warning: --precision bf16: compute: declared bf16, found fp32" in printed
    assert "fix:" in printed
    assert (tmp_path / "precision.txt").read_text().startswith("1 violation")
    assert call_main(*args, "--no-check-precision", "--overwrite") == 0
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.slow
def test_precision_of_a_file_pins_modules_and_goes_along_with_the_run(text, tmp_path):
    file = tmp_path / "head_in_fp32.toml"
    file.write_text('level = "bf16"\n[modules]\n"head" = "fp32"\n')
    args = ("--data", text, *TINY, "--steps", 2, "--precision")
    run = tmp_path / "run"
    rows = jobs.train(run, (*args, file))
    assert rows != jobs.train(tmp_path / "plain", (*args, "bf16"))
    file.unlink()
    resumed = jobs.train(run, ("--resume", run, "--steps", 3))
    assert resumed[-1]["step"] == 3


@pytest.mark.parametrize(
    "content",
    [
        pytest.param('level = "bf17"', id="unknown level"),
        pytest.param("level =", id="no TOML"),
        pytest.param("", id="empty"),
        pytest.param('[modules]\n"head" = "fp32"', id="no level"),
        pytest.param('level = "bf16"\n[module]', id="unknown table"),
        pytest.param('level = "bf16"\n[modules]\n"haed" = "fp32"', id="unknown module"),
    ],
)
def test_bad_file_of_precision_is_named(text, tmp_path, capsys, content):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    args = ("--data", text, *TINY, "--run-dir", tmp_path / "run")
    message = refused(capsys, *args, "--precision", file)
    assert "bad.toml" in message
