"""What a run is asked for by its flags, and what it leaves: data, models, optimizers, text."""

import functools
import itertools
import json
import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from distamp import initialize
from launch import compare, evaluate, sample
from launch.checkpoint import load_run
from launch.config import Config, parse, read_config
from launch.data import Batch, Data, batch_indices, load_data
from launch.folder import list_checkpoints
from launch.job import Job
from launch.model import find_blocks
from launch.optim import WeightAverage, lr_fraction
from launch.parallel import Layout
from launch.program import UsageError
from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import FP16, SHORT, TINY, losses

# Runs and ranks that its tests share.
pytestmark = pytest.mark.xdist_group("launch runs")

# -- data ------------------------------------------------------------------------------------------


def test_every_epoch_reads_each_example_once_and_in_another_order():
    batches = batch_indices(10, 0, 0, 10)
    first, second = next(batches), next(batches)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_held_out_text_is_in_no_training_window(text):
    data = load_data(Config(data=str(text), seq_len=16))
    assert len(data.train.tokens) + len(data.held_out.tokens) == text.stat().st_size
    inputs, targets = data.train[0]
    assert inputs[1:].equal(targets[:-1])
    assert data.text.decode(inputs.tolist()) == text.read_text()[:16]


def test_tokens_of_a_bin_and_their_tokenizer(text, tokenizer, tmp_path):
    words = load_data(Config(data=str(text), tokenizer=tokenizer, seq_len=16))
    encode, decode = words.text.encode, words.text.decode
    assert decode(encode("row 7: 7")) == "row 7: 7"
    # The same as nanoGPT's files have it, in two files or in one, of 16 bits or of 32.
    ids = np.array(encode(text.read_text()), np.uint16)
    cut = len(ids) - len(ids) // 10
    ids[:cut].tofile(tmp_path / "train.bin")
    ids[cut:].tofile(tmp_path / "val.bin")
    ids.astype("uint32").tofile(tmp_path / "uint32.bin")
    for place, bits in ((".", "uint16"), ("uint32.bin", "uint32")):
        data = load_data(Config(data=str(tmp_path / place), seq_len=16, token_dtype=bits))
        assert data.train[3][0].equal(words.train[3][0])
        assert data.held_out[1][1].equal(words.held_out[1][1])
        assert data.classes == 1 + ids.max()


def pairs() -> tuple[TensorDataset, TensorDataset, int]:
    """Images, which are of two classes."""
    torch.manual_seed(0)
    images = torch.randn(80, 3, 4, 4)
    both = TensorDataset(images, (images[:, 0].sum((1, 2)) > 0).long())
    return TensorDataset(*both[:64]), TensorDataset(*both[64:]), 2


def classifier(data: Data, width: int = 8) -> nn.Module:
    flat = data.train[0][0].numel()
    norm = nn.BatchNorm1d(width)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(flat, width), norm, nn.ReLU(), nn.Linear(width, data.classes)
    )


class Empty(nn.Sequential):
    """A model that is built on the meta device, and draws one tensor after the other."""

    def init_weight(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 2:
            nn.init.xavier_normal_(tensor)
        else:
            nn.init.constant_(tensor, name in ("2.weight", "2.running_var"))


def empty_classifier(data: Data, width: int) -> nn.Module:
    with torch.device("meta"):
        return Empty(*classifier(data, width))


@pytest.mark.parametrize(
    ("model", "layout"), [("classifier", "--shard -1"), ("empty_classifier", "")]
)
def test_data_and_model_of_ones_own(ranks2, tmp_path, model, layout):
    own = ("--data", f"{__name__}:pairs", "--model", f"{__name__}:{model}", "--model-args")
    args = (*own, "width=16", *SHORT, "--steps", 12, "--save-every", 5, "--precision", "fp16")
    rows = ranks2.run(jobs.train, tmp_path / "two", (*args, *layout.split()))[0]
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    # It starts as one process does, with batch norms that have seen nothing yet.
    alone = jobs.train(tmp_path / "one", (*args, "--steps", 1, "--keep-checkpoints", 0))
    assert rows[0] == pytest.approx(alone[0], rel=1e-3)
    list_checkpoints(tmp_path / "two")[0].joinpath(".metadata").unlink()
    assert ranks2.run(jobs.train, tmp_path / "two", ("--resume", tmp_path / "two"))[0] == rows


# -- models ----------------------------------------------------------------------------------------


def test_model_of_transformers_from_its_config_is_drawn_as_there(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    small = ("n_layer=2", "n_embd=32", "n_head=2", "resid_pdrop=0", "embd_pdrop=0", "attn_pdrop=0")
    args = ("--data", text, *SHORT, "--model", "hf:gpt2", "--model-args", *small)
    jobs.train(tmp_path, (*args, "--lr", 1e-9, "--steps", 1))
    model = load_run(tmp_path, load_data(read_config(tmp_path))).model
    inner = model.inner
    assert [*find_blocks(model)] == [*inner.transformer.h]
    theirs = transformers.AutoModelForCausalLM.from_config(inner.config)
    for name, expected in theirs.named_parameters():
        found = inner.get_parameter(name)
        assert found.std().item() == pytest.approx(expected.std().item(), rel=0.2, abs=1e-6), name


def test_model_of_a_folder_has_its_weights_and_else_new_ones(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(1)  # not that of a run, which would draw the same
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "whole")
    config.save_pretrained(tmp_path / "bare")
    first = ("--data", text, *SHORT, "--steps", 1, "--keep-checkpoints", 0, "--model")
    data = load_data(Config(data=str(text), seq_len=16))
    tokens, targets = data.train[next(batch_indices(len(data.train), 0, 0, 8))[0]]
    expected = nn.functional.cross_entropy(model(tokens[None]).logits[0], targets).item()
    for kind in ("whole", "bare"):
        rows = jobs.train(
            tmp_path / f"run {kind}", (*first, f"hf:{tmp_path / kind}", "--global-batch-size", 1)
        )
        assert (losses(rows)[0] == pytest.approx(expected, rel=1e-5)) == (kind == "whole")


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags", ["--optimizer muon --schedule wsd --accumulate 4", "--optimizer torch.optim:NAdam"]
)
def test_copies_train_as_one_process_with_the_whole_batch(ranks2, text, tmp_path, flags):
    args = ("--data", text, *TINY, "--steps", 4, "--keep-checkpoints", 0, *flags.split())
    alone = losses(jobs.train(tmp_path / "alone", (*args, "--accumulate", 1)))
    assert alone[-1] < alone[0]
    rows = ranks2.run(jobs.train, tmp_path / "two", args)[0]
    assert losses(rows) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_schedules_rise_and_end_where_they_are_to(schedule):
    config = Config(schedule=schedule, steps=100, warmup=10, min_lr_ratio=0.1)
    rates = [lr_fraction(config, taken) for taken in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert rates[11:] == sorted(rates[11:], reverse=True)


def test_rate_and_average_wait_while_steps_are_skipped_and_go_on(text, tmp_path):
    args = ("--data", text, *TINY, *FP16, "--steps", 16, "--warmup", 0, "--ema", 0.5)
    rows = jobs.train(
        tmp_path,
        (*args, "--save-every", 1, "--keep-checkpoints", 16),
        ("--resume", tmp_path / "checkpoints" / "step-00000011"),
    )
    steps = [row for row in rows if "loss" in row]
    assert steps[-1]["skipped"] == sum(not row["taken"] for row in steps) > 1
    first = next(index for index, row in enumerate(steps) if row["taken"])
    for before, after in itertools.pairwise(steps[first:]):
        assert (before["learning_rate"] != after["learning_rate"]) == before["taken"]
        averages = [jobs.weights(tmp_path, row["step"], "ema.") for row in (before, after)]
        if after["taken"]:
            averages[0].lerp_(jobs.weights(tmp_path, after["step"]), 0.5)
        torch.testing.assert_close(*averages)


def test_fp8_trains_as_bf16_does(text, tmp_path):
    pytest.importorskip("torchao")
    args = ("--data", text, *TINY, "--steps", 12, "--keep-checkpoints", 0, "--precision")
    bf16, fp8 = (losses(jobs.train(tmp_path / level, (*args, level))) for level in ("bf16", "fp8"))
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=1e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler asks
def test_compiled_blocks_have_the_losses_of_eager_ones(text, tmp_path, monkeypatch):
    # All but the last part of it, which writes C++ and compiles that.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    args = ("--data", text, *TINY, "--layers", 1, "--steps", 2)
    eager = losses(jobs.train(tmp_path / "1", args))
    compiled = jobs.train(tmp_path / "2", (*args, "--compile", "--activation-checkpointing", "all"))
    assert losses(compiled) == pytest.approx(eager, rel=1e-4)


# -- what it leaves --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    flags = "--steps 40 --ema 0.5 --tensorboard --precision fp16 --peak-tflops 0.1 --run-dir"
    assert main([*map(str, ("--data", text, *TINY)), *flags.split(), str(folder)]) == 0
    return folder


def test_run_leaves_records_a_picture_and_events(finished):
    rows = jobs.records(finished)
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 40]
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["validation_loss"] / math.log(2))
    assert all(0 < row["mfu"] < 1 for row in rows if "loss" in row)
    assert losses(rows)[-1] < 0.8 * losses(rows)[0]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((finished / "tensorboard").iterdir())


def evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> float:
    assert evaluate.main([str(run), "--examples", "16"]) == 0
    return float(capsys.readouterr().out.split()[2])


def test_evaluate_has_the_loss_of_the_run_at_its_level_and_of_averaged_weights(
    finished, text, tmp_path, capsys
):
    rows = jobs.train(tmp_path, ("--data", text, *TINY, "--steps", 2, "--precision", "fp16-O2"))
    found, last = evaluated(tmp_path, capsys), rows[-1]["validation_loss"]
    assert found == pytest.approx(last, abs=1e-4)
    averaged, last = evaluated(finished, capsys), jobs.records(finished)[-1]["validation_loss"]
    assert last != averaged == pytest.approx(last, rel=0.1)


def test_sample_goes_on_with_a_prompt(finished, capsys):
    said = []
    for more in ("", "--seed 1", "--temperature 5 --top-k 0"):
        flags = ["--prompt", "row 1", *f"--tokens 30 --temperature 0 {more}".split()]
        assert sample.main([str(finished), *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith("row 1")
    assert said[0] == said[1] != said[2]


def test_compare_shows_what_differs(finished, text, tmp_path, capsys):
    jobs.train(tmp_path / "other", ("--data", text, *TINY, "--steps", 2))
    runs = [str(finished), str(tmp_path / "other")]
    assert compare.main([*runs, "--out", str(tmp_path / "both.png")]) == 0
    out = capsys.readouterr().out
    assert "--precision" in out
    assert "--global-batch-size" not in out
    assert (tmp_path / "both.png").stat().st_size > 1000


def test_time_that_is_over_saves_and_flags_count_when_it_is_resumed(tmp_path):
    args = (
        *("--data", f"{__name__}:pairs", "--model", f"{__name__}:classifier"),
        *("--model-args", "width=16", *SHORT, "--steps", 100000, "--max-time", "0.3s"),
    )
    assert main([*map(str, args), "--run-dir", str(tmp_path)]) == 0
    last = jobs.records(tmp_path)[-1]
    assert "validation_loss" in last
    assert list_checkpoints(tmp_path)[0].name == f"step-{last['step']:08d}"
    found = parse(["--resume", str(tmp_path), "--lr", "0.5"])
    assert (found.lr, found.seq_len, found.model_args) == (0.5, 16, ("width=16",))
    assert found.run_dir == tmp_path


# -- data as people have them: labels of every kind, each counted once -----------------------------

Pair = namedtuple("Pair", ["image", "label"])
CPU = torch.device("cpu")
IMAGES = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
LABELS = (IMAGES.sum(1) > 0).long()
KINDS = {
    "tensors": lambda image, label: (image, label),
    "ints": lambda image, label: (image, int(label)),
    "arrays": lambda image, label: (image.numpy(), label.numpy()),
    "named": lambda image, label: Pair(image, int(label)),
    "dicts": lambda image, label: {"image": image, "label": int(label)},
    "several": lambda image, label: {"left": image[:3], "right": image[3:], "labels": int(label)},
    "threes": lambda image, label: (image[:3], image[3:], label),
}


class Both(nn.Module):
    """A model of images that come whole, or in two halves."""

    def __init__(self, data: object = None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(left if right is None else torch.cat([left, right], 1))


def examples(kind: str) -> tuple[list[Any], list[Any], int]:
    made = [KINDS[kind](*pair) for pair in zip(IMAGES, LABELS, strict=True)]
    return made[:32], made[32:], 2


ints, arrays, named, dicts, several, threes, tensors = (
    lambda kind=kind: examples(kind)
    for kind in ("ints", "arrays", "named", "dicts", "several", "threes", "tensors")
)


def test_examples_of_every_kind_train_and_are_judged_alike(tmp_path):
    own = (
        *("--model", f"{__name__}:Both", *SHORT, "--steps", 3),
        *("--keep-checkpoints", 0, "--peak-tflops", 1e-6),
    )
    rows = {k: jobs.train(tmp_path / k, (*own, "--data", f"{__name__}:{k}")) for k in KINDS}
    expected = rows.pop("tensors")
    assert "accuracy" in expected[0]
    for row in expected:
        row.pop("mfu", None)  # depends on the machine's load
    for kind, found in rows.items():
        assert [{k: v for k, v in row.items() if k != "mfu"} for row in found] == expected, kind


class Noisy(list[Any]):
    """Images to which noise is added whenever they are read."""

    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return image + torch.rand(6), label


def noisy() -> tuple[list[Any], list[Any], int]:
    train, held_out, classes = examples("ints")
    return Noisy(train), held_out, classes


def test_examples_that_draw_random_numbers_draw_the_same_when_a_run_goes_on(tmp_path):
    own = ("--model", f"{__name__}:Both", "--data", f"{__name__}:noisy", *SHORT)
    whole = jobs.train(tmp_path, (*own, "--steps", 4, "--save-every", 2))
    assert jobs.train(tmp_path, ("--resume", tmp_path / "checkpoints" / "step-00000002")) == whole


def spoilt() -> tuple[list[Any], list[Any], int]:
    train, held_out, classes = examples("ints")
    train[0] = (torch.full((6,), torch.nan), 0)
    return train, held_out, classes


def test_batch_with_a_nan_is_skipped_on_every_rank_and_its_birth_is_told(ranks2, tmp_path):
    own = ("--model", f"{__name__}:Both", "--data", f"{__name__}:spoilt", *SHORT, "--steps", 6)
    args = (*own, "--global-batch-size", 16, "--precision", "bf16", "--on-nonfinite", "report")
    rows = ranks2.run(jobs.train, tmp_path, args)[0]
    steps = [row for row in rows if "loss" in row]
    assert [row["loss"] is None for row in steps] == [not row["taken"] for row in steps]
    skipped = [row["step"] for row in steps if not row["taken"]]
    assert steps[-1]["skipped"] == len(skipped) == 3
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    told = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert [(each["step"], each["kind"]) for each in told] == [(step, "input") for step in skipped]


def hopeless() -> tuple[list[Any], list[Any], int]:
    train, held_out, classes = examples("ints")
    return [(torch.full((6,), torch.nan), label) for _, label in train], held_out, classes


def test_run_that_only_skips_ends_and_says_where_to_look(tmp_path):
    own = ("--model", f"{__name__}:Both", "--data", f"{__name__}:hopeless", *SHORT, "--steps", 6)
    message = "3 steps in a row were skipped. nonfinite.jsonl lists the operations"
    with pytest.raises(UsageError, match=message):
        jobs.train(tmp_path, (*own, "--precision", "bf16", "--on-nonfinite", "report"))


def test_step_whose_norm_is_a_spike_is_skipped(text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 4)
    norms = [row["gradient_norm"] for row in jobs.train(tmp_path / "1", args) if "loss" in row]
    limit = (norms[0] + max(norms)) / 2 if norms[0] < max(norms) else norms[0] * 0.999
    rows = [
        r for r in jobs.train(tmp_path / "2", (*args, "--skip-norm-above", limit)) if "loss" in r
    ]
    assert [row["taken"] for row in rows] == [row["gradient_norm"] <= limit for row in rows]
    assert not all(row["taken"] for row in rows)


def test_examples_without_a_target_are_refused():
    for example in (IMAGES[0], {"image": IMAGES[0], "class": 1}, [IMAGES[0]]):
        with pytest.raises(Exception, match="an example"):
            Batch.from_collated(default_collate([example]), CPU)


def judged(length: int) -> dict[str, float]:
    """Evaluate on this rank's share of some held-out examples."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, config = Both(), Config(global_batch_size=6)
    images, labels = torch.randn(17, 6), torch.arange(17) % 2
    data = Data("", [], list(zip(images, labels, strict=True)), 2)
    layout = Layout(rank, 2, replicate=2)
    amp = initialize(model, [], "fp32")
    found = evaluate.evaluate(
        Job(config, data, CPU, layout, model, amp, WeightAverage(amp, 0.0)), length
    )
    chosen = [place * 17 // length for place in range(length)]
    logits = model.double()(images[chosen].double())
    loss = nn.functional.cross_entropy(logits, labels[chosen]).item()
    right = (logits.argmax(1) == labels[chosen]).double().mean().item()
    return {**found, "expected_loss": loss, "expected_accuracy": right}


@pytest.mark.parametrize("length", [1, 7, 12, 17])
def test_each_held_out_example_is_counted_once(ranks2, length):
    """Also where one rank has run out and repeats what it had."""
    for found in ranks2.run(judged, length):
        assert found["validation_loss"] == pytest.approx(found["expected_loss"], rel=1e-6)
        assert found["accuracy"] == pytest.approx(found["expected_accuracy"])


def test_top_k_keeps_exactly_k():
    def likely(tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, tokens.shape[1], 8)
        logits[..., 5] = 0.1
        return logits  # the others are alike

    model = nn.Module()
    model.forward = likely  # type: ignore[method-assign]
    for k in (1, 3, 8, 99):
        drawn = sample.sample(model, torch.tensor([0]), 4, 1.0, k)
        tokens = {next(drawn) for _ in range(300)}
        assert len(tokens) == min(k, 8)
        assert 5 in tokens


def test_tokens_are_made_once_for_a_text_and_a_tokenizer(text, tokenizer, tmp_path):
    config = Config(data=str(text), tokenizer=tokenizer, seq_len=16)
    tokens = torch.tensor(load_data(config).train.tokens)
    (kept,) = (tmp_path / "cache").rglob("*.bin")
    kept.write_bytes(kept.read_bytes()[::-1])
    assert not torch.tensor(load_data(config).train.tokens).equal(tokens)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + " and more")
    assert torch.tensor(load_data(Config(data=str(other), tokenizer=tokenizer)).train.tokens)[
        :100
    ].equal(tokens[:100])


def test_sample_needs_the_folder_of_the_run_alone(text, tokenizer, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text.txt").write_text(text.read_text())
    monkeypatch.chdir(tmp_path / "here")
    jobs.train(
        tmp_path / "run",
        ("--data", "text.txt", "--tokenizer", "../tokenizer.json", *TINY, "--steps", 2),
    )
    monkeypatch.chdir(tmp_path / "run")
    tokenizer.unlink()
    # The paths of a run are its own, wherever it is read from.
    assert Path(read_config(tmp_path / "run").data) == tmp_path / "here" / "text.txt"
    (tmp_path / "here" / "text.txt").unlink()
    capsys.readouterr()
    assert sample.main(["../run", "--tokens", "5", "--prompt", "row"]) == 0
    assert capsys.readouterr().out.startswith("row")
