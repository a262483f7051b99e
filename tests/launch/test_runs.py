"""What a run is asked for by its flags, and what it leaves: data, models, optimizers, text."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from launch import compare, evaluate, sample
from launch.config import Config, checkpoints_of, parse
from launch.data import Data, Order, load_data
from launch.optim import part_of_peak
from launch.train import main
from tests.launch import jobs
from tests.launch.jobs import TINY, losses


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.text_file(tmp_path_factory.mktemp("text"))


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "count"), [(1, 8), (2, 4), (4, 1)])
def test_position_means_the_same_on_any_number_of_ranks(world, count):
    """Whoever reads them, in whichever microbatches: the examples of a position are the same."""
    step, length = 8, 20
    for position in (0, 16, 40):
        found: list[int] = []
        sources = [iter(Order(length, 3, position, count, rank, world)) for rank in range(world)]
        while len(found) < step:
            found += [index for source in sources for index in next(source)]
        alone = next(iter(Order(length, 3, position, step)))
        assert sorted(found) == sorted(alone)


def test_every_epoch_reads_each_example_once_and_in_another_order():
    order = iter(Order(10, 0, 0, 10))
    first, second = next(order), next(order)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_held_out_text_is_in_no_training_window(text):
    data = load_data(Config(data=str(text), block=16))
    assert len(data.train.tokens) + len(data.held_out.tokens) == text.stat().st_size
    inputs, targets = data.train[0]
    assert inputs[1:].equal(targets[:-1])
    assert data.decode(inputs.tolist()) == text.read_text()[:16]


def test_tokens_of_a_bin_and_their_tokenizer(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train([str(text)], trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    words = load_data(Config(data=str(text), tokenizer=path, block=16))
    assert words.classes == tokenizer.get_vocab_size()
    assert words.decode(words.encode("row 7: 7")) == "row 7: 7"
    # The same as nanoGPT's files have it.
    ids = np.array(tokenizer.encode(text.read_text()).ids, np.uint16)
    cut = len(ids) - len(ids) // 10
    ids[:cut].tofile(tmp_path / "train.bin")
    ids[cut:].tofile(tmp_path / "val.bin")
    tokens = load_data(Config(data=str(tmp_path), block=16))
    assert tokens.train[3][0].equal(words.train[3][0])
    assert tokens.held_out[1][1].equal(words.held_out[1][1])
    # And from one file, of which the last tenth is held out: of 16 bits, of 32, and llm.c's.
    for bits in ("16", "32"):
        ids.astype(f"uint{bits}").tofile(tmp_path / f"{bits}.bin")
    for name, magic, dtype in (("gpt2", 20240520, "uint16"), ("llama", 20240801, "uint32")):
        header = np.zeros(256, np.int32)
        header[:3] = magic, 1, len(ids)
        (tmp_path / f"{name}.bin").write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    for name in ("16", "32", "gpt2", "llama"):
        flags = {"token_dtype": "uint32"} if name == "32" else {}
        one = load_data(Config(data=str(tmp_path / f"{name}.bin"), block=16, **flags))
        assert one.held_out[1][1].equal(words.held_out[1][1]), name
        assert one.classes == 1 + ids.max()
    rows = jobs.train(
        tmp_path / "run", ("--data", tmp_path, "--tokenizer", path, *TINY, "--steps", 6)
    )
    assert losses(rows)[-1] < losses(rows)[0]


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], (self.inputs[index, 0].sum() > 0).long()


def pairs() -> tuple[Pairs, Pairs, int]:
    """Images, which are of two classes."""
    return Pairs(64), Pairs(16), 2


def classifier(data: Data, width: int = 8) -> nn.Module:
    flat = data.train[0][0].numel()
    norm = nn.BatchNorm1d(width)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(flat, width), norm, nn.ReLU(), nn.Linear(width, data.classes)
    )


class Empty(nn.Sequential):
    """A model that is built on the meta device, and draws one layer after the other."""

    def init_weights(self, layer: nn.Module) -> None:
        layer.reset_parameters()


def empty_classifier(data: Data, width: int) -> nn.Module:
    with torch.device("meta"):
        return Empty(*classifier(data, width))


@pytest.mark.parametrize(
    ("model", "layout"),
    [("classifier", ""), ("classifier", "--shard -1"), ("empty_classifier", "")],
)
def test_data_and_model_of_ones_own(ranks2, tmp_path, model, layout):
    own = ("--data", f"{__name__}:pairs", "--model", f"{__name__}:{model}", "--model-args")
    args = (*own, "width=16", *TINY, "--steps", 12, "--save-every", 5, "--precision", "fp16")
    rows = ranks2.run(jobs.train, tmp_path, (*args, *layout.split()))[0]
    assert losses(rows)[-1] < 0.9 * losses(rows)[0]
    checkpoints_of(tmp_path)[0].joinpath(".metadata").unlink()
    assert ranks2.run(jobs.train, tmp_path, ("--resume", tmp_path))[0] == rows


# -- models ----------------------------------------------------------------------------------------


def test_model_of_transformers_from_its_config_over_ranks(ranks2, text, tmp_path):
    pytest.importorskip("transformers")
    small = ("n_layer=2", "n_embd=16", "n_head=2", "resid_pdrop=0", "embd_pdrop=0", "attn_pdrop=0")
    args = ("--data", text, *TINY, "--steps", 3, "--model", "hf:gpt2")
    args = (*args, "--model-args", *small)
    alone = losses(jobs.train(tmp_path / "alone", args))
    rows = ranks2.run(jobs.train, tmp_path / "fsdp2", (*args, "--shard", -1))[0]
    assert losses(rows) == pytest.approx(alone, rel=1e-5)


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
    first = ("--data", text, *TINY, "--steps", 1, "--keep", 0, "--model")
    data = load_data(Config(data=str(text), block=16))
    tokens, targets = data.train[next(iter(Order(len(data.train), 0, 0, 8)))[0]]
    found = {}
    for kind in ("whole", "bare"):
        rows = jobs.train(tmp_path / f"run {kind}", (*first, f"hf:{tmp_path / kind}", "--batch", 1))
        found[kind] = losses(rows)[0]
    logits = model(input_ids=tokens[None]).logits[0]
    expected = nn.functional.cross_entropy(logits, targets).item()
    assert found["whole"] == pytest.approx(expected, rel=1e-5)
    assert found["bare"] != pytest.approx(expected, rel=1e-5)


# -- optimizers ------------------------------------------------------------------------------------


def test_muon_learns_and_is_that_of_one_process_over_copies(ranks2, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 5, "--optimizer", "muon", "--schedule", "wsd")
    alone = losses(jobs.train(tmp_path / "alone", args))
    assert alone[-1] < alone[0]
    assert losses(ranks2.run(jobs.train, tmp_path / "two", args)[0]) == pytest.approx(
        alone, rel=1e-4
    )
    said = ranks2.run(jobs.refusal, *args, "--shard", 2, "--run-dir", tmp_path / "three")
    assert "--optimizer muon" in said[0]
    assert "--shard" in said[0]


def test_optimizer_of_ones_own(text, tmp_path):
    rows = jobs.train(
        tmp_path, ("--data", text, *TINY, "--steps", 4, "--optimizer", "torch.optim:NAdam")
    )
    assert losses(rows)[-1] < losses(rows)[0]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_schedules_rise_and_end_where_they_are_to(schedule):
    config = Config(schedule=schedule, steps=100, warmup=10, final_lr=0.1)
    rates = [part_of_peak(config, taken) for taken in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert rates[11:] == sorted(rates[11:], reverse=True)


def test_learning_rate_waits_while_steps_are_skipped(text, tmp_path):
    args = ("--data", text, *TINY, "--precision", "fp16", "--init-scale", 2.0**24, "--steps", 16)
    steps = [r for r in jobs.train(tmp_path, (*args, "--warmup", 0)) if "loss" in r]
    assert not steps[0]["taken"]
    assert steps[-1]["taken"]
    assert steps[-1]["skipped"] == sum(not row["taken"] for row in steps)
    for before, after in itertools.pairwise(steps):
        assert (before["learning_rate"] != after["learning_rate"]) == before["taken"]


def test_accumulated_microbatches_are_the_batch(ranks2, text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 3)
    whole = losses(jobs.train(tmp_path / "1", args))
    parts = losses(ranks2.run(jobs.train, tmp_path / "2", (*args, "--accumulate", 4))[0])
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler asks
def test_compiled_blocks_have_the_losses_of_eager_ones(text, tmp_path):
    args = ("--data", text, *TINY, "--layers", 1, "--steps", 2)
    eager = losses(jobs.train(tmp_path / "1", args))
    compiled = jobs.train(tmp_path / "2", (*args, "--compile", "--checkpoint-blocks", "all"))
    assert losses(compiled) == pytest.approx(eager, rel=1e-4)


# -- what it leaves --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    args = (
        "--data",
        text,
        *TINY,
        "--steps",
        40,
        "--ema",
        0.5,
        "--tensorboard",
        "--precision",
        "fp16",
    )
    assert main([*map(str, args), "--run-dir", str(folder), "--peak-tflops", "0.1"]) == 0
    return folder


def test_run_leaves_records_a_picture_and_events(finished):
    rows = jobs.records(finished)
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 40]
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["validation_loss"] / math.log(2))
    assert all(0 < row["mfu"] < 1 for row in rows if "loss" in row)
    assert losses(rows)[-1] < 0.8 * losses(rows)[0]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((finished / "tensorboard").iterdir())


def test_evaluate_has_the_loss_of_the_averaged_weights(finished, capsys):
    evaluate.main(finished, examples=16)
    loss = float(capsys.readouterr().out.split()[2])
    last = jobs.records(finished)[-1]["validation_loss"]
    assert loss == pytest.approx(last, rel=0.1)
    assert loss != pytest.approx(last, rel=1e-6)


def test_sample_goes_on_with_a_prompt(finished, capsys):
    sample.main(finished, prompt="row 1", tokens=30, temperature=0)
    first = capsys.readouterr().out
    assert first.startswith("row 1")
    assert len(first) > 20
    sample.main(finished, prompt="row 1", tokens=30, temperature=0, seed=1)
    assert capsys.readouterr().out == first
    sample.main(finished, prompt="row 1", tokens=30, temperature=5.0, top_k=0)
    assert capsys.readouterr().out != first


def test_compare_shows_what_differs(finished, text, tmp_path, capsys):
    jobs.train(tmp_path / "other", ("--data", text, *TINY, "--steps", 2))
    compare.main([finished, tmp_path / "other"], out=tmp_path / "both.png")
    out = capsys.readouterr().out
    assert "--precision" in out
    assert "--batch" not in out
    assert (tmp_path / "both.png").stat().st_size > 1000


# -- going on -----------------------------------------------------------------------------------


def test_time_that_is_over_saves_and_exits_with_0(text, tmp_path):
    args = ["--data", str(text), *map(str, TINY), "--steps", "100000", "--max-time", "0.005"]
    assert main([*args, "--run-dir", str(tmp_path)]) == 0
    last = jobs.records(tmp_path)[-1]["step"]
    assert checkpoints_of(tmp_path)[0].name == f"step-{last:08d}"


def test_flags_of_the_run_are_those_it_is_resumed_with(text, tmp_path):
    jobs.train(tmp_path, ("--data", text, *TINY, "--steps", 2, "--model-args", "a=1", "b=2"))
    found = parse(["--resume", str(tmp_path), "--lr", "0.5"])
    assert (found.lr, found.width, found.model_args) == (0.5, 16, ("a=1", "b=2"))
    assert found.run_dir == tmp_path
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 1e-2
