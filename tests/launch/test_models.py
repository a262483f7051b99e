"""Which models there are, and what each is built like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from PIL import Image

from launch.config import Config, Shape
from launch.corpus import Corpus
from launch.data import Data, Images, Text
from launch.errors import UsageError
from launch.images import load_digits, load_folder
from launch.models import count_parameters, init_model, mean_loss, recipe_for
from launch.parallel import decayed_names, split
from tests.launch import jobs, pooled

CPU = torch.device("cpu")
SMALL = Shape(layers=2, heads=2, width=16, block=8)


def _text(block: int = 8) -> Text:
    bytes_ = torch.arange(1000).remainder(256).to(torch.uint8)
    return Text(Corpus("bytes", bytes_[:900], bytes_[900:], "digest"), block, seed=0)


def _build(config: Config, data: Data | None = None, seed: int = 0) -> torch.nn.Module:
    return init_model(recipe_for(config), data or _text(), seed, CPU)


def test_a_byte_model_does_not_look_ahead():
    model = _build(Config(shape=SMALL))
    one = torch.randint(256, (1, 8))
    other = one.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    changed = (model(one) != model(other)).any(dim=-1)[0]
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_weights_depend_on_the_seed_alone():
    torch.rand(7)
    config = Config(shape=SMALL)
    one = _build(config, seed=1).head.weight
    torch.rand(3)
    assert torch.equal(one, _build(config, seed=1).head.weight)
    assert not torch.equal(one, _build(config, seed=2).head.weight)


def test_loss_of_fp16_logits_is_taken_in_fp32():
    logits, targets = torch.randn(2, 5, 256).half(), torch.randint(256, (2, 5))
    loss = mean_loss(logits, targets)
    reference = F.cross_entropy(logits.double().view(-1, 256), targets.view(-1))
    assert loss.dtype == torch.float32
    assert loss.double().item() == pytest.approx(reference.item(), rel=1e-6)


def test_every_parameter_is_in_one_group_and_matrices_alone_decay():
    model = _build(Config(shape=SMALL))
    decayed, rest = split(model, decayed_names(model), Config(weight_decay=0.1))
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["gpt", "hf:gpt2"])
def test_parameters_are_counted_without_their_memory(name):
    args = ("n_layer=1", "n_embd=8", "n_head=2") if name == "hf:gpt2" else ()
    config = Config(model=name, model_args=args, shape=SMALL)
    built = sum(p.numel() for p in _build(config).parameters())
    assert count_parameters(recipe_for(config), _text()) == built


SMALL_HF = {
    "hf:gpt2": ("n_layer=1", "n_embd=16", "n_head=2"),
    "hf:llama": ("num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2"),
    "hf:bert": ("num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2"),
}


@pytest.mark.parametrize("name", SMALL_HF)
def test_hugging_face_language_model_predicts_bytes_and_does_not_look_ahead(name):
    more = () if name == "hf:gpt2" else ("intermediate_size=32",)
    more = (*more, "num_key_value_heads=2") if name == "hf:llama" else more
    model = _build(Config(model=name, model_args=(*SMALL_HF[name], *more))).eval()
    one = torch.randint(256, (1, 8))
    other = one.clone()
    other[0, 5] = (other[0, 5] + 1) % 256
    changed = ~torch.isclose(model(one), model(other), atol=1e-6).all(dim=-1)[0]
    assert changed.tolist() == [False] * 5 + [True] * 3
    assert model(one).shape == (1, 8, 256)


def test_hugging_face_image_classifier_takes_the_datas_size_and_classes():
    small = ("num_hidden_layers=1", "hidden_size=16", "num_attention_heads=2", "patch_size=4")
    data = Images(load_digits(), seed=0)
    model = _build(Config(model="hf:vit", model_args=(*small, "intermediate_size=32")), data)
    assert model(data.sample).shape == (1, 10)


def test_digits_classifier_takes_the_datas_size_and_classes():
    data = Images(load_digits(), seed=0)
    assert _build(Config(model="digits", shape=SMALL), data)(data.sample).shape == (1, 10)


class UsersOwn(torch.nn.Module):
    """A model as somebody would write it in a file of their own."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(classes, width)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(x))
        return logits


def make_own(data: Data, width: int = 4) -> UsersOwn:
    return UsersOwn(data.classes, width)


def test_users_own_factory_is_called_with_the_data_and_its_arguments():
    name = f"{__name__}:make_own"
    model = _build(Config(model=name, model_args=("width=7",)))
    assert isinstance(model, UsersOwn)
    assert model.embed.weight.shape == (256, 7)


def make_nothing(data: Data) -> str:
    return "no model"


@pytest.mark.parametrize(
    ("model", "args", "shown"),
    [
        ("gtp", (), "--model gtp: it must be gpt, digits, hf:NAME or module:factory"),
        ("hf:gtp2", (), "has no causal language model and no image classifier of this type"),
        ("hf:gpt2", ("layers=3",), "--model-args layers: GPT2Config has no such setting"),
        ("hf:gpt2", ("n_embd=10", "n_head=3"), "transformers cannot build it"),
        ("gpt", ("layers=3",), "--model gpt takes none"),
        ("nowhere:make", (), "No module named 'nowhere'"),
        (f"{__name__}:missing", (), "has no attribute 'missing'"),
        (f"{__name__}:make_nothing", (), "it returned str, not a Module"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name(model, args, shown):
    with pytest.raises(UsageError, match="--model") as refused:
        _build(Config(model=model, model_args=args))
    assert shown in str(refused.value)
    assert "\n" not in str(refused.value)


def test_patches_that_do_not_fit_the_image_are_refused():
    data = Images(load_digits(), seed=0)
    with pytest.raises(UsageError, match="--patch 3: images of 8 x 8 pixels"):
        _build(Config(model="digits", shape=Shape(patch=3)), data)


def _train(folder: Path, *args: object) -> list[dict[str, Any]]:
    return pooled.train(folder, args)


def test_the_digits_are_learnt_in_bf16(tmp_path):
    flags = ("--model", "digits", "--precision", "bf16", "--width", 32, "--heads", 2, "--layers", 1)
    rows = _train(tmp_path, *flags, "--steps", 150, "--warmup", 10, "--evaluate-every", 150)
    assert rows[0]["validation_accuracy"] < 0.3
    assert rows[-1]["validation_accuracy"] > 0.45
    assert "bits_per_byte" not in rows[1]


def test_a_hugging_face_model_learns_text(tmp_path):
    args = ("--model-args", *SMALL_HF["hf:gpt2"], "--block", 16, "--batch", 8, "--lr", 1e-2)
    data = ("--data", jobs.text_file(tmp_path))
    rows = _train(tmp_path / "run", "--model", "hf:gpt2", *args, *data, "--steps", 30)
    assert rows[-1]["validation_bits_per_byte"] < rows[0]["validation_bits_per_byte"] - 1


def _pictures(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name, level in (("dark", 40), ("light", 200)):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            noise = torch.randint(0, 40, (10, 12, 3), generator=generator)
            pixels = (noise + level).to(torch.uint8).numpy()
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def test_pictures_of_a_folder_are_classed_by_the_folder_they_lie_in(tmp_path):
    pictures = load_folder(_pictures(tmp_path), size=8)
    assert pictures.pixels.shape == (60, 3, 8, 8)
    assert pictures.classes == ("dark", "light")
    light = pictures.pixels.float().mean(dim=(1, 2, 3)) > 128
    assert torch.equal(light.long(), pictures.labels)
    assert 5 < pictures.labels[-30:].sum() < 25  # mixed, so that what is held out is of both


def test_a_folder_of_pictures_is_learnt(tmp_path):
    data = ("--data", _pictures(tmp_path / "pictures"), "--image-size", 8)
    flags = ("--model", "digits", "--width", 16, "--heads", 2, "--batch", 8, "--warmup", 2)
    rows = _train(tmp_path / "run", *flags, *data, "--steps", 20, "--evaluate-every", 20)
    assert rows[-1]["validation_accuracy"] == 1.0


def test_pictures_that_cannot_be_read_or_have_no_classes_are_refused(tmp_path):
    folder = _pictures(tmp_path / "pictures")
    shown = pooled.refusal("--data", folder, "--run-dir", tmp_path / "run")
    assert shown == f"--data {folder}: images, and --model gpt is for text"
    shown = pooled.refusal("--model", "digits", "--data", folder / "dark")
    assert "pictures of 0 classes; put those of each class into a folder of its own" in shown
    (folder / "dark" / "broken.png").write_bytes(b"no picture")
    shown = pooled.refusal("--model", "digits", "--data", folder, "--image-size", 8)
    assert "cannot read" in shown
    assert "\n" not in shown


def test_images_come_in_an_order_that_depends_on_the_seed_and_once_an_epoch():
    data = Images(load_digits(), seed=3)
    seen = data.take(0, len(data))[0]
    again = Images(load_digits(), seed=3).take(0, len(data))[0]
    assert torch.equal(seen, again)
    assert len(torch.unique(seen.flatten(1), dim=0)) == len(
        torch.unique(data.pictures.pixels[: len(data)].flatten(1), dim=0)
    )
    assert not torch.equal(Images(load_digits(), seed=4).take(0, 9)[0], seen[:9])
