"""Which models there are, and what each is built like."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)

from launch.config import Config, Shape
from launch.corpus import Corpus
from launch.data import Data, Images, Text
from launch.errors import UsageError
from launch.images import load_digits
from launch.models import count_parameters, init_model, mean_loss, recipe_for
from launch.strategies import _decayed, _split

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
    decayed, rest = _split(model, _decayed(model), Config(weight_decay=0.1))
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
    ("model", "args", "said"),
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
def test_a_model_that_cannot_be_is_refused_by_name(model, args, said):
    with pytest.raises(UsageError, match="--model") as refused:
        _build(Config(model=model, model_args=args))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_patches_that_do_not_fit_the_image_are_refused():
    data = Images(load_digits(), seed=0)
    with pytest.raises(UsageError, match="--patch 3: images of 8 x 8 pixels"):
        _build(Config(model="digits", shape=Shape(patch=3)), data)
