"""Runs of the launcher by their flags: data, models, optimizers, and the files of a run."""

import functools
import itertools
import json
import math
from collections import namedtuple
from collections.abc import Callable
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

# The tests share runs and ranks.
pytestmark = pytest.mark.xdist_group("launch runs")
slow = pytest.mark.slow

# Examples for training, held-out examples, and the number of classes.
Examples = tuple[list[Any], list[Any], int]


def call_main(*args: object) -> int:
    """Call the launcher with these flags, and return its exit code."""
    return main([str(arg) for arg in args])


# -- data ------------------------------------------------------------------------------------------


def test_every_epoch_reads_each_example_once_and_in_another_order():
    epochs = batch_indices(10, 0, 0, 10)
    first = next(epochs)
    second = next(epochs)
    assert sorted(first) == list(range(10))
    assert sorted(second) == list(range(10))
    assert first != second


def test_held_out_text_is_in_no_training_window(text):
    data = load_data(Config(data=str(text), seq_len=16))
    num_train = len(data.train.tokens)
    num_held_out = len(data.held_out.tokens)
    assert num_train + num_held_out == text.stat().st_size


def test_targets_of_text_are_the_next_characters(text):
    data = load_data(Config(data=str(text), seq_len=16))
    inputs, targets = data.train[0]
    assert inputs[1:].equal(targets[:-1])
    window = data.text.decode(inputs.tolist())
    assert window == text.read_text()[:16]


def test_tokenizer_decodes_its_own_tokens(text, tokenizer):
    data = load_data(Config(data=str(text), tokenizer=tokenizer, seq_len=16))
    tokens = data.text.encode("row 7: 7")
    assert data.text.decode(tokens) == "row 7: 7"


def write_token_files(folder: Path, tokens: list[int]) -> None:
    """Write tokens as nanoGPT does, in two files of 16 bits, and in one file of 32 bits."""
    ids = np.array(tokens, np.uint16)
    num_held_out = len(ids) // 10
    ids[:-num_held_out].tofile(folder / "train.bin")
    ids[-num_held_out:].tofile(folder / "val.bin")
    ids.astype("uint32").tofile(folder / "uint32.bin")


@pytest.mark.parametrize(("file", "dtype"), [(".", "uint16"), ("uint32.bin", "uint32")])
def test_files_of_tokens_have_the_examples_of_their_text(text, tokenizer, tmp_path, file, dtype):
    expected = load_data(Config(data=str(text), tokenizer=tokenizer, seq_len=16))
    tokens = expected.text.encode(text.read_text())
    write_token_files(tmp_path, tokens)
    data = load_data(Config(data=str(tmp_path / file), seq_len=16, token_dtype=dtype))
    inputs, _ = data.train[3]
    expected_inputs, _ = expected.train[3]
    assert inputs.equal(expected_inputs)
    _, targets = data.held_out[1]
    _, expected_targets = expected.held_out[1]
    assert targets.equal(expected_targets)
    assert data.classes == 1 + max(tokens)


def pairs() -> tuple[TensorDataset, TensorDataset, int]:
    """Return images of two classes, for training and held out."""
    torch.manual_seed(0)
    images = torch.randn(80, 3, 4, 4)
    labels = (images[:, 0].sum((1, 2)) > 0).long()
    train = TensorDataset(images[:64], labels[:64])
    held_out = TensorDataset(images[64:], labels[64:])
    return train, held_out, 2


def classifier(data: Data, width: int = 8) -> nn.Module:
    """Return a classifier of images with a batch norm."""
    image, _ = data.train[0]
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(image.numel(), width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, data.classes),
    )


class Empty(nn.Sequential):
    """A model on the meta device, which initializes its tensors by name."""

    def init_weight(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 2:
            nn.init.xavier_normal_(tensor)
        else:
            nn.init.constant_(tensor, name in ("2.weight", "2.running_var"))


def empty_classifier(data: Data, width: int) -> nn.Module:
    """Return the classifier without the storage of its tensors."""
    with torch.device("meta"):
        return Empty(*classifier(data, width))


CLASSIFY = ("--data", f"{__name__}:pairs", "--model-args", "width=16", *SHORT)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("classifier", "--shard -1", id="fsdp2", marks=slow),
        pytest.param("empty_classifier", "", id="ddp, meta device"),
    ],
)
def test_data_and_model_of_the_user_train_and_resume(ranks2, tmp_path, model, layout):
    model_flags = ("--model", f"{__name__}:{model}", "--precision", "fp16")
    args = (*CLASSIFY, *model_flags, "--steps", 12, "--save-every", 5)
    run = tmp_path / "two"
    rows = ranks2.run(jobs.train, run, (*args, *layout.split()))[0]
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    # The ranks start as one process does, with batch norms in their initial state.
    one_process = jobs.train(tmp_path / "one", (*args, "--steps", 1, "--keep-checkpoints", 0))
    assert rows[0] == pytest.approx(one_process[0], rel=1e-3)
    # Without the index of the last checkpoint, the run resumes from the one before it.
    last_checkpoint = list_checkpoints(run)[0]
    (last_checkpoint / ".metadata").unlink()
    resumed = ranks2.run(jobs.train, run, ("--resume", run))[0]
    assert resumed == rows


# -- models ----------------------------------------------------------------------------------------


SMALL_GPT2 = "n_layer=2 n_embd=32 n_head=2 resid_pdrop=0 embd_pdrop=0 attn_pdrop=0"


@slow
def test_model_of_transformers_from_its_config_is_drawn_as_there(text, tmp_path):
    transformers = pytest.importorskip("transformers")
    args = ("--data", text, *SHORT, "--model", "hf:gpt2", "--model-args", *SMALL_GPT2.split())
    jobs.train(tmp_path, (*args, "--lr", 1e-9, "--steps", 1))
    model = load_run(tmp_path, load_data(read_config(tmp_path))).model
    inner = model.inner
    assert list(find_blocks(model)) == list(inner.transformer.h)
    expected_model = transformers.AutoModelForCausalLM.from_config(inner.config)
    for name, expected in expected_model.named_parameters():
        deviation = inner.get_parameter(name).std().item()
        assert deviation == pytest.approx(expected.std().item(), rel=0.2, abs=1e-6), name


def first_loss(model: nn.Module, text: Path) -> float:
    """Return the loss of a model on the first example of a run."""
    data = load_data(Config(data=str(text), seq_len=16))
    first_batch = next(batch_indices(len(data.train), 0, 0, 8))
    tokens, targets = data.train[first_batch[0]]
    logits = model(tokens[None]).logits[0]
    return nn.functional.cross_entropy(logits, targets).item()


@slow
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
    # With the seed of a run, the new weights would be equal to these.
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "with_weights")
    config.save_pretrained(tmp_path / "config_only")
    args = ("--data", text, *SHORT, "--steps", 1, "--keep-checkpoints", 0)
    losses_by_folder = {}
    for name in ("with_weights", "config_only"):
        flags = ("--model", f"hf:{tmp_path / name}", "--global-batch-size", 1)
        rows = jobs.train(tmp_path / f"run {name}", (*args, *flags))
        losses_by_folder[name] = losses(rows)[0]
    expected = pytest.approx(first_loss(model, text), rel=1e-5)
    assert losses_by_folder["with_weights"] == expected
    assert losses_by_folder["config_only"] != expected


# -- optimizers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--optimizer muon --schedule wsd --accumulate 4", id="muon, accumulation"),
        pytest.param("--optimizer torch.optim:NAdam", id="NAdam", marks=slow),
    ],
)
def test_replicas_train_as_one_process_with_the_whole_batch(ranks2, text, tmp_path, flags):
    args = ("--data", text, *TINY, "--steps", 4, "--keep-checkpoints", 0, *flags.split())
    expected = losses(jobs.train(tmp_path / "one", (*args, "--accumulate", 1)))
    assert expected[-1] < expected[0]
    rows = ranks2.run(jobs.train, tmp_path / "two", args)[0]
    assert losses(rows) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "last_rate"), [("cosine", 0.1), ("wsd", 0.1), ("linear", 0.1), ("constant", 1.0)]
)
def test_schedules_rise_and_end_where_they_are_to(schedule, last_rate):
    config = Config(schedule=schedule, steps=100, warmup=10, min_lr_ratio=0.1)
    rates = [lr_fraction(config, num_taken) for num_taken in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[10] == 1.0
    assert max(rates) == 1.0
    assert rates[100] == pytest.approx(last_rate)
    assert rates[11:] == sorted(rates[11:], reverse=True)


@pytest.fixture(scope="module")
def averaging_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Rows]:
    """A resumed fp16 run with an average of the weights, and the records of its training steps.

    The scale grows every second step, so steps are skipped before and after the resume.
    """
    folder = tmp_path_factory.mktemp("averaging")
    args = ("--data", text, *TINY, *FP16, "--steps", 16, "--warmup", 0, "--ema", 0.5)
    rows = jobs.train(
        folder,
        (*args, "--save-every", 1, "--keep-checkpoints", 16),
        ("--resume", folder / "checkpoints" / "step-00000011"),
    )
    return folder, jobs.training_records(rows)


def steps_after_the_first_update(rows: jobs.Rows) -> jobs.Rows:
    """Return the records from the first step that was not skipped."""
    return list(itertools.dropwhile(lambda row: not row["taken"], rows))


def test_rate_waits_while_steps_are_skipped_and_goes_on(averaging_run):
    _, rows = averaging_run
    skipped = [row for row in rows if not row["taken"]]
    assert rows[-1]["skipped"] == len(skipped)
    assert len(skipped) > 1
    for row, next_row in itertools.pairwise(steps_after_the_first_update(rows)):
        has_moved = row["learning_rate"] != next_row["learning_rate"]
        assert has_moved == row["taken"]


def test_average_waits_while_steps_are_skipped_and_goes_on(averaging_run):
    run, rows = averaging_run
    for row, next_row in itertools.pairwise(steps_after_the_first_update(rows)):
        expected = jobs.weights(run, row["step"], "ema.")
        if next_row["taken"]:
            expected.lerp_(jobs.weights(run, next_row["step"]), 0.5)
        average = jobs.weights(run, next_row["step"], "ema.")
        torch.testing.assert_close(average, expected)


@slow  # The tests of the levels train in fp8.
def test_fp8_trains_as_bf16_does(text, tmp_path):
    pytest.importorskip("torchao")
    args = ("--data", text, *TINY, "--steps", 6, "--keep-checkpoints", 0, "--precision")
    bf16_rows = jobs.train(tmp_path / "bf16", (*args, "bf16"))
    bf16 = losses(bf16_rows)
    fp8 = losses(jobs.train(tmp_path / "fp8", (*args, "fp8")))
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=1e-2)


@slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler reads it
def test_compiled_blocks_have_the_losses_of_eager_ones(text, tmp_path, monkeypatch):
    # The last stage of the compiler writes C++ and takes long, so this backend leaves it out.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    args = ("--data", text, *TINY, "--layers", 1, "--steps", 2)
    eager = losses(jobs.train(tmp_path / "eager", args))
    flags = ("--compile", "--activation-checkpointing", "all")
    compiled = losses(jobs.train(tmp_path / "compiled", (*args, *flags)))
    assert compiled == pytest.approx(eager, rel=1e-4)


# -- the files of a run and the programs that read them ------------------------------------------


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, with pictures and events."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    flags = "--steps 25 --ema 0.5 --tensorboard --precision fp16 --peak-tflops 0.1"
    exit_code = call_main("--data", text, *TINY, *flags.split(), "--run-dir", folder)
    assert exit_code == 0
    return folder


def test_run_leaves_records_a_picture_and_events(finished):
    rows = jobs.records(finished)
    evaluated_steps = [row["step"] for row in rows if "validation_loss" in row]
    assert evaluated_steps == [0, 25]
    bits = rows[0]["validation_loss"] / math.log(2)
    assert rows[0]["bits_per_byte"] == pytest.approx(bits)
    for row in jobs.training_records(rows):
        assert 0 < row["mfu"] < 1
    training_losses = losses(rows)
    assert training_losses[-1] < 0.8 * training_losses[0]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((finished / "tensorboard").iterdir())


def evaluate_run(run: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """Return the loss that the program evaluate prints."""
    assert evaluate.main([str(run), "--examples", "16"]) == 0
    return float(capsys.readouterr().out.split()[2])


def test_evaluate_has_the_loss_of_the_run_at_its_level(text, tmp_path, capsys):
    rows = jobs.train(tmp_path, ("--data", text, *TINY, "--steps", 2, "--precision", "fp16-O2"))
    last_loss = rows[-1]["validation_loss"]
    assert evaluate_run(tmp_path, capsys) == pytest.approx(last_loss, abs=1e-4)


def test_evaluate_reads_the_averaged_weights(finished, capsys):
    last_loss = jobs.records(finished)[-1]["validation_loss"]
    averaged_loss = evaluate_run(finished, capsys)
    assert averaged_loss == pytest.approx(last_loss, rel=0.1)
    assert averaged_loss != last_loss


@slow
def test_sample_goes_on_with_a_prompt(finished, capsys):
    def print_sample(*flags: str) -> str:
        """Return the text that the program sample prints for a prompt."""
        args = [str(finished), "--prompt", "row 1", "--tokens", "30", "--temperature", "0"]
        assert sample.main([*args, *flags]) == 0
        return capsys.readouterr().out

    likeliest = print_sample()
    assert likeliest.startswith("row 1")
    assert print_sample("--seed", "1") == likeliest
    assert print_sample("--temperature", "5", "--top-k", "0") != likeliest


@slow
def test_compare_shows_what_differs(finished, text, tmp_path, capsys):
    other_run = tmp_path / "other"
    picture = tmp_path / "both.png"
    jobs.train(other_run, ("--data", text, *TINY, "--steps", 2))
    assert compare.main([str(finished), str(other_run), "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "--precision" in printed
    assert "--global-batch-size" not in printed
    assert picture.stat().st_size > 1000


@pytest.fixture(scope="module")
def timed_out_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended at its --max-time."""
    folder = tmp_path_factory.mktemp("timed_out")
    model = ("--model", f"{__name__}:classifier")
    time_limit = ("--steps", 100_000, "--max-time", "0.3s")
    exit_code = call_main(*CLASSIFY, *model, *time_limit, "--run-dir", folder)
    assert exit_code == 0
    return folder


def test_run_whose_time_is_over_evaluates_and_saves(timed_out_run):
    last = jobs.records(timed_out_run)[-1]
    assert "validation_loss" in last
    assert list_checkpoints(timed_out_run)[0].name == f"step-{last['step']:08d}"


def test_flags_of_a_resume_replace_the_flags_of_the_run(timed_out_run):
    config = parse(["--resume", str(timed_out_run), "--lr", "0.5"])
    assert config.lr == 0.5
    assert config.seq_len == 16
    assert config.model_args == ("width=16",)
    assert config.run_dir == timed_out_run


# -- data of users: examples of every kind ---------------------------------------------------------

Pair = namedtuple("Pair", ["image", "label"])
CPU = torch.device("cpu")
IMAGES = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
LABELS = (IMAGES.sum(1) > 0).long()


class HalvesClassifier(nn.Module):
    """A classifier of images, which may come in two halves."""

    def __init__(self, data: object = None) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> torch.Tensor:
        image = left if right is None else torch.cat([left, right], 1)
        return self.layer(image)


CLASSIFY_HALVES = ("--model", f"{__name__}:HalvesClassifier", *SHORT)


def make_examples(convert: Callable[[torch.Tensor, torch.Tensor], Any]) -> Examples:
    """Return examples of one kind: for training, held out, and the number of classes."""
    examples = []
    for image, label in zip(IMAGES, LABELS, strict=True):
        examples.append(convert(image, label))
    return examples[:32], examples[32:], 2


def tensors() -> Examples:
    return make_examples(lambda image, label: (image, label))


def ints() -> Examples:
    return make_examples(lambda image, label: (image, int(label)))


def arrays() -> Examples:
    return make_examples(lambda image, label: (image.numpy(), label.numpy()))


def named() -> Examples:
    return make_examples(lambda image, label: Pair(image, int(label)))


def dicts() -> Examples:
    return make_examples(lambda image, label: {"image": image, "label": int(label)})


def halves() -> Examples:
    return make_examples(
        lambda image, label: {"left": image[:3], "right": image[3:], "labels": int(label)}
    )


def triples() -> Examples:
    return make_examples(lambda image, label: (image[:3], image[3:], label))


def train_classifier(folder: Path, data: str) -> jobs.Rows:
    """Train on data of this module, and return the records without the load of the machine."""
    flags = ("--steps", 3, "--keep-checkpoints", 0, "--peak-tflops", 1e-6)
    rows = jobs.train(folder, (*CLASSIFY_HALVES, *flags, "--data", f"{__name__}:{data}"))
    for row in rows:
        row.pop("mfu", None)
    return rows


@pytest.fixture(scope="module")
def rows_of_tensors(tmp_path_factory: pytest.TempPathFactory) -> jobs.Rows:
    """The records of a run on pairs of tensors."""
    return train_classifier(tmp_path_factory.mktemp("tensors"), "tensors")


@pytest.mark.parametrize("kind", ["ints", "arrays", "named", "dicts", "halves", "triples"])
def test_examples_of_every_kind_train_and_are_judged_alike(rows_of_tensors, tmp_path, kind):
    assert "accuracy" in rows_of_tensors[0]
    assert train_classifier(tmp_path, kind) == rows_of_tensors


class Noisy(list[Any]):
    """Images that get new noise whenever the run reads them."""

    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return image + torch.rand(6), label


def noisy() -> Examples:
    train, held_out, classes = ints()
    return Noisy(train), held_out, classes


def test_examples_that_draw_random_numbers_draw_the_same_when_a_run_goes_on(tmp_path):
    args = (*CLASSIFY_HALVES, "--data", f"{__name__}:noisy", "--steps", 4, "--save-every", 2)
    uninterrupted = jobs.train(tmp_path, args)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    assert jobs.train(tmp_path, ("--resume", checkpoint)) == uninterrupted


def one_nan() -> Examples:
    train, held_out, classes = ints()
    train[0] = (torch.full((6,), torch.nan), 0)
    return train, held_out, classes


REPORT_NONFINITE = ("--precision", "bf16", "--on-nonfinite", "report")


def test_batch_with_a_nan_is_skipped_on_every_rank_and_its_birth_is_told(ranks2, tmp_path):
    flags = ("--data", f"{__name__}:one_nan", "--global-batch-size", 16, *REPORT_NONFINITE)
    rows = ranks2.run(jobs.train, tmp_path, (*CLASSIFY_HALVES, "--steps", 6, *flags))[0]
    steps = jobs.training_records(rows)
    skipped = [row["step"] for row in steps if not row["taken"]]
    without_loss = [row["step"] for row in steps if row["loss"] is None]
    # Two batches are an epoch, so the example comes three times in six steps.
    assert len(skipped) == 3
    assert without_loss == skipped
    assert steps[-1]["skipped"] == 3
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    reported = []
    for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines():
        report = json.loads(line)
        assert report["kind"] == "input"
        reported.append(report["step"])
    assert reported == skipped


def only_nan() -> Examples:
    train, held_out, classes = ints()
    train = [(torch.full((6,), torch.nan), label) for _, label in train]
    return train, held_out, classes


def test_run_that_only_skips_ends_and_says_where_to_look(tmp_path):
    args = (*CLASSIFY_HALVES, "--data", f"{__name__}:only_nan", "--steps", 6, *REPORT_NONFINITE)
    message = "3 steps in a row were skipped. nonfinite.jsonl lists the operations"
    with pytest.raises(UsageError, match=message):
        jobs.train(tmp_path, args)


@slow
def test_step_whose_norm_is_a_spike_is_skipped(text, tmp_path):
    args = ("--data", text, *TINY, "--steps", 4)
    unlimited = jobs.training_records(jobs.train(tmp_path / "unlimited", args))
    norms = [row["gradient_norm"] for row in unlimited]
    # The steps before the largest norm are the same in both runs, so that norm comes again.
    limit = 0.999 * max(norms)
    limited = jobs.train(tmp_path / "limited", (*args, "--skip-norm-above", limit))
    steps = jobs.training_records(limited)
    for row in steps:
        assert row["taken"] == (row["gradient_norm"] <= limit)
    assert any(not row["taken"] for row in steps)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(IMAGES[0], id="a tensor"),
        pytest.param({"image": IMAGES[0], "class": 1}, id="a dict without a label"),
        pytest.param([IMAGES[0]], id="a list of one tensor"),
    ],
)
def test_examples_without_a_target_are_refused(example):
    with pytest.raises(Exception, match="an example"):
        Batch.from_collated(default_collate([example]), CPU)


def evaluate_on_rank(num_examples: int) -> tuple[dict[str, float], dict[str, float]]:
    """Evaluate held-out examples on this rank, and return the results and the expected results."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = HalvesClassifier()
    images = torch.randn(17, 6)
    labels = torch.arange(17) % 2
    data = Data("", [], list(zip(images, labels, strict=True)), 2)
    amp = initialize(model, [], "fp32")
    layout = Layout(rank, 2, replicate=2)
    average = WeightAverage(amp, 0.0)
    job = Job(Config(global_batch_size=6), data, CPU, layout, model, amp, average)
    results = evaluate.evaluate(job, num_examples)
    # The evaluation takes examples at equal distances.
    indices = [index * 17 // num_examples for index in range(num_examples)]
    expected_labels = labels[indices]
    logits = model.double()(images[indices].double())
    loss = nn.functional.cross_entropy(logits, expected_labels)
    is_right = logits.argmax(1) == expected_labels
    accuracy = is_right.double().mean()
    expected = {"validation_loss": loss.item(), "accuracy": accuracy.item()}
    return results, expected


@pytest.mark.parametrize("num_examples", [1, 7, 12, 17])
def test_each_held_out_example_is_counted_once(ranks2, num_examples):
    """A rank that runs out of examples repeats one, and the repeated example must not count."""
    for results, expected in ranks2.run(evaluate_on_rank, num_examples):
        assert results["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-6)
        assert results["accuracy"] == pytest.approx(expected["accuracy"])


class UniformModel(nn.Module):
    """A model of eight tokens, of which token 5 is a little more likely."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, tokens.shape[1], 8)
        logits[..., 5] = 0.1
        return logits


@pytest.mark.parametrize(("top_k", "num_tokens"), [(1, 1), (3, 3), (8, 8), (99, 8)])
def test_top_k_keeps_exactly_k(top_k, num_tokens):
    samples = sample.sample(UniformModel(), torch.tensor([0]), 4, 1.0, top_k)
    tokens = set(itertools.islice(samples, 300))
    assert len(tokens) == num_tokens
    assert 5 in tokens


def load_tokens(text: Path, tokenizer: Path) -> torch.Tensor:
    """Return the training tokens of a text."""
    data = load_data(Config(data=str(text), tokenizer=tokenizer, seq_len=16))
    return torch.tensor(data.train.tokens)


def test_tokens_are_made_once_for_a_text_and_a_tokenizer(text, tokenizer, tmp_path):
    tokens = load_tokens(text, tokenizer)
    (cached_file,) = (tmp_path / "cache").rglob("*.bin")
    reversed_tokens = cached_file.read_bytes()[::-1]
    cached_file.write_bytes(reversed_tokens)
    assert not load_tokens(text, tokenizer).equal(tokens)
    # Another text is tokenized, and does not get the tokens in the cache.
    longer_text = tmp_path / "longer.txt"
    longer_text.write_text(text.read_text() + " and more")
    assert load_tokens(longer_text, tokenizer)[:100].equal(tokens[:100])


def test_sample_needs_the_folder_of_the_run_alone(text, tokenizer, tmp_path, monkeypatch, capsys):
    start_folder = tmp_path / "start"
    start_folder.mkdir()
    copied_text = start_folder / "text.txt"
    copied_text.write_text(text.read_text())
    run = tmp_path / "run"
    monkeypatch.chdir(start_folder)
    relative_paths = ("--data", "text.txt", "--tokenizer", "../tokenizer.json")
    jobs.train(run, (*relative_paths, *TINY, "--steps", 2))
    # Relative paths of a run stay relative to the folder that the run was started from.
    monkeypatch.chdir(run)
    assert Path(read_config(run).data) == copied_text
    tokenizer.unlink()
    copied_text.unlink()
    capsys.readouterr()
    assert sample.main(["../run", "--tokens", "5", "--prompt", "row"]) == 0
    assert capsys.readouterr().out.startswith("row")
