"""Hugging Face's Trainer with distamp's scaler, beside torch's; TRL's is in `cells`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainers.common import FAULT, digest, fresh_accelerate, needs, plant_inf, quiet, together

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate", "transformers")

SCALE = 2.0**10
STEPS = 5
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def net() -> Any:
    """A language model of a few thousand weights, from a config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS) + 2, **sizes, **heads, **ends))


def tokenizer() -> Any:
    """Words to numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<pad>", "<eos>", *WORDS])}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def texts(count: int) -> list[str]:
    return [" ".join(WORDS[(n + k) % len(WORDS)] for k in range(6)) for n in range(count)]


def train(
    folder: str,
    ours: bool = True,
    fault: int | None = FAULT,
    mixin: dict[str, Any] | None = None,
    resume: bool = False,
    **arguments: Any,
) -> Any:
    """A run of STEPS steps; rank 1 overflows in one of them."""
    quiet()
    from transformers import Trainer, TrainingArguments

    from distamp.integrations.transformers import DistTrainerMixin

    fresh_accelerate()

    class Faulty(Trainer):
        steps = 0

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            if self.accelerator.sync_gradients:
                plant_inf(model.parameters(), self.steps, fault)
            self.steps += 1
            return loss

    class Ours(DistTrainerMixin, Faulty):
        pass

    class Theirs(Faulty):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
            self.accelerator.native_amp = True

    defaults = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "fp16": not arguments.get("bf16"),
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "linear",
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(**(defaults | arguments))
    settings = {"scaler_settings": {"init_scale": SCALE}} if mixin is None else mixin
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer()(texts(48))["input_ids"]]
    trainer = (Ours if ours else Theirs)(
        model=net(), args=args, train_dataset=rows, **(settings if ours else {})
    )
    trainer.train(resume_from_checkpoint=resume or None)
    logs = [each for each in trainer.state.log_history if "loss" in each]
    scaler = trainer.accelerator.scaler
    return SimpleNamespace(
        weights=digest(trainer.model),
        scale=None if scaler is None else scaler.get_scale(),
        rates=[each["learning_rate"] for each in logs],
        told=[logs[-1].get(name) for name in ("loss_scale", "skipped_steps")],
        global_step=trainer.state.global_step,
    )


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_ranks_skip_together_with_any_optimizer_and_schedules_wait(ranks2, tmp_path, optim):
    runs = ranks2.run(train, str(tmp_path), optim=optim)
    assert together(runs)
    assert runs[0].told == [runs[0].scale, 1] == [SCALE / 2, 1]
    taken = [n - (n > FAULT) for n in range(STEPS)]
    assert runs[0].rates == pytest.approx([0.01 * (1 - n / STEPS) for n in taken])


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.1, "optim": "adamw_torch_fused"},
    ],
)
def test_the_run_is_the_trainers_to_the_bit_until_one_rank_overflows(ranks2, tmp_path, arguments):
    ours, theirs = (
        ranks2.run(train, str(tmp_path), each, fault=None, **arguments) for each in (True, False)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.rates == other.rates
        # A norm over ranks is summed in another order than torch's.
        rel = 1e-6 if arguments.get("max_grad_norm") != 0 else 0
        assert mine.weights == pytest.approx(other.weights, rel=rel, abs=0)
    if not arguments.get("max_grad_norm", 1.0):
        assert not together(ranks2.run(train, str(tmp_path), ours=False))


def test_a_hook_compresses_the_gradients(ranks2, tmp_path):
    mixin = {"comm_hook": "fp16", "scaler_settings": {"init_scale": SCALE}}
    hooked = ranks2.run(train, str(tmp_path), fault=None, mixin=mixin)
    plain = ranks2.run(train, str(tmp_path), fault=None)
    assert together(hooked)
    assert hooked[0].weights != plain[0].weights, "rounded on the way"
    assert hooked[0].weights == pytest.approx(plain[0].weights, rel=1e-3)


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_of_either_goes_on_in_the_other(
    ranks2, tmp_path: Path, first: bool, then: bool
):
    folder = str(tmp_path)
    saving = {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    whole, _ = ranks2.run(train, folder, ours=first, fault=None, **saving)
    state = torch.load(tmp_path / "checkpoint-3" / "scaler.pt")
    assert (state["scale"], state["_growth_tracker"]) == (SCALE, 3)
    (tmp_path / f"checkpoint-{STEPS}").rename(tmp_path / "last")
    resumed, _ = ranks2.run(train, folder, ours=then, fault=None, resume=True, max_grad_norm=0.0)
    assert resumed.global_step == STEPS
    assert resumed.weights == whole.weights


def at_bf16(folder: str) -> None:
    with pytest.raises(ValueError, match=r"'bf16'.*init_scale"):
        train(folder, bf16=True, mixin={"scaler_settings": {"init_scale": 2.0}})


def test_at_bf16_there_is_no_loss_scale_to_set(ranks2, tmp_path):
    ranks2.run(at_bf16, str(tmp_path))
