"""Data as people have them: labels of every kind, each counted once; tokens that are kept."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from distamp import initialize
from launch import sample
from launch.config import Config, read_config
from launch.data import Batch, Data, load_data
from launch.evaluate import evaluate
from launch.job import Job
from launch.optim import Average
from launch.parallel import Layout
from tests.launch import jobs
from tests.launch.jobs import TINY

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
    own = ("--model", f"{__name__}:Both", *TINY, "--steps", 3, "--keep", 0, "--peak-tflops", 1e-6)
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
    own = ("--model", f"{__name__}:Both", "--data", f"{__name__}:noisy", *TINY)
    whole = jobs.train(tmp_path, (*own, "--steps", 4, "--save-every", 2))
    resume = ("--resume", tmp_path / "checkpoints" / "step-00000002")
    assert jobs.train(tmp_path, resume) == whole


def spoilt() -> tuple[list[Any], list[Any], int]:
    train, held_out, classes = examples("ints")
    train[0] = (torch.full((6,), torch.nan), 0)
    return train, held_out, classes


def test_batch_with_a_nan_is_skipped_on_every_rank_in_any_precision(ranks2, tmp_path):
    own = ("--model", f"{__name__}:Both", "--data", f"{__name__}:spoilt", *TINY, "--steps", 6)
    for precision in ("fp32", "bf16"):
        args = (*own, "--batch", 16, "--precision", precision)
        rows = ranks2.run(jobs.train, tmp_path / precision, args)[0]
        steps = [row for row in rows if "loss" in row]
        assert [row["loss"] is None for row in steps] == [not row["taken"] for row in steps]
        assert steps[-1]["skipped"] == sum(not row["taken"] for row in steps) == 3
        assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]


def test_where_a_nan_was_born_goes_into_the_folder_of_the_run(ranks2, tmp_path):
    own = ("--model", f"{__name__}:Both", "--data", f"{__name__}:spoilt", *TINY, "--steps", 4)
    ranks2.run(jobs.train, tmp_path, (*own, "--batch", 16, "--on-nonfinite", "report"))
    skipped = [row["step"] for row in jobs.records(tmp_path) if not row.get("taken", True)]
    lines = (tmp_path / "nonfinite.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == skipped != []
    assert all(json.loads(line)["kind"] == "input" for line in lines)


def test_step_whose_norm_is_a_spike_is_skipped(text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 4)
    norms = [row["gradient_norm"] for row in jobs.train(tmp_path / "1", args) if "loss" in row]
    limit = (norms[0] + max(norms)) / 2 if norms[0] < max(norms) else norms[0] * 0.999
    rows = [r for r in jobs.train(tmp_path / "2", (*args, "--skip-above", limit)) if "loss" in r]
    assert [row["taken"] for row in rows] == [row["gradient_norm"] <= limit for row in rows]
    assert not all(row["taken"] for row in rows)


def test_examples_without_a_target_are_refused():
    for example in (IMAGES[0], {"image": IMAGES[0], "class": 1}, [IMAGES[0]]):
        with pytest.raises(Exception, match="an example"):
            Batch.of(default_collate([example]), CPU)


def judged(length: int) -> dict[str, float]:
    """Evaluate on this rank's share of some held-out examples."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, config = Both(), Config(batch=6)
    images, labels = torch.randn(17, 6), torch.arange(17) % 2
    data = Data("", [], list(zip(images, labels, strict=True)), 2)
    layout = Layout(rank, 2, replicate=2)
    amp = initialize(model, [], "O0")
    found = evaluate(Job(config, data, CPU, layout, model, amp, Average(amp, 0.0)), length)
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
    config = Config(data=str(text), tokenizer=tokenizer, block=16)
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
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "text.txt").write_text(text.read_text())
    monkeypatch.chdir(tmp_path / "here")
    args = ("--data", "text.txt", "--tokenizer", "../tokenizer.json", *TINY, "--steps", 2)
    jobs.train(tmp_path / "run", args)
    monkeypatch.chdir(tmp_path / "there")
    tokenizer.unlink()
    flags = ["../run", "--tokens", "5", "--prompt", "row"]
    # The paths of a run are its own, wherever it is read from.
    assert Path(read_config(tmp_path / "run").data) == tmp_path / "here" / "text.txt"
    (tmp_path / "here" / "text.txt").unlink()
    capsys.readouterr()
    assert sample.main(flags) == 0
    assert capsys.readouterr().out.startswith("row")
