"""Hugging Face's Trainer and TRL's trainers with distamp's scaler, beside torch's."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.common import FAULT, digest, needs, plant_inf, quiet, refusal

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate", "transformers")

SCALE = 2.0**10
STEPS = 5
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


@dataclass
class Run:
    """What a run left on one rank."""

    weights: float = 0.0
    scale: float = 0.0
    rates: list[float] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    global_step: int = 0


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


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Longer words earn more: something that differs between samples."""
    return [float(len(set(each))) for each in completions]


@functools.cache
def kinds() -> dict[str, Any]:
    """Trainer class, its arguments' class, what both need, for each kind."""
    import transformers

    found: dict[str, Any] = {}
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer()(texts(48))["input_ids"]]
    found["Trainer"] = (
        transformers.Trainer,
        transformers.TrainingArguments,
        {},
        {"train_dataset": rows},
    )
    try:
        import trl
        from datasets import Dataset
    except ImportError:
        return found
    plain = Dataset.from_dict({"text": texts(48)})
    halves = [(each[:5], each[6:]) for each in texts(48)]
    prompts, ends = map(list, zip(*halves, strict=True))
    wrong = [end[::-1] for end in ends]
    pairs = Dataset.from_dict({"prompt": prompts, "chosen": ends, "rejected": wrong})
    asked = Dataset.from_dict({"prompt": prompts})
    found["SFTTrainer"] = (
        trl.SFTTrainer,
        trl.SFTConfig,
        {"max_length": 8},
        {"train_dataset": plain, "processing_class": tokenizer()},
    )
    found["DPOTrainer"] = (
        trl.DPOTrainer,
        trl.DPOConfig,
        {"max_length": 8},
        {"train_dataset": pairs, "processing_class": tokenizer(), "ref_model": net()},
    )
    found["GRPOTrainer"] = (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {"num_generations": 2, "max_completion_length": 4},
        {"train_dataset": asked, "processing_class": tokenizer(), "reward_funcs": rewards},
    )
    return found


def train(
    folder: str,
    ours: bool = True,
    kind: str = "Trainer",
    fault: bool = True,
    mixin: dict[str, Any] | None = None,
    resume: bool = False,
    precision: str = "fp16",
    **arguments: Any,
) -> Run:
    """A run of STEPS steps; rank 1 overflows in step FAULT."""
    quiet()
    from accelerate.state import AcceleratorState, GradientState

    from distamp.integrations.transformers import DistTrainerMixin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    trainer_class, arguments_class, more, needs = kinds()[kind]

    class Faulty(trainer_class):
        steps = 0

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            if fault and self.accelerator.sync_gradients:
                plant_inf(model.parameters(), self.steps)
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
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
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
    args = arguments_class(**(defaults | more | arguments))
    extra = (
        (mixin if mixin is not None else {"scaler_settings": {"init_scale": SCALE}}) if ours else {}
    )
    trainer = (Ours if ours else Theirs)(model=net(), args=args, **needs, **extra)
    run = Run()
    trainer.train(resume_from_checkpoint=resume or None)
    run.logs = [each for each in trainer.state.log_history if "loss" in each]
    run.rates = [each["learning_rate"] for each in run.logs]
    run.weights = digest(trainer.model.parameters())
    scaler = trainer.accelerator.scaler
    run.scale = 0.0 if scaler is None else scaler.get_scale()
    run.global_step = trainer.state.global_step
    return run


def together(runs: list[Run]) -> bool:
    return (runs[0].weights, runs[0].scale) == (runs[1].weights, runs[1].scale)


KINDS = ["Trainer", "SFTTrainer", "DPOTrainer", "GRPOTrainer"]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_together_where_torchs_scaler_parts_them(ranks2, tmp_path, kind):
    if kind != "Trainer":
        needs("trl", "datasets")
    assert not together(ranks2.run(train, str(tmp_path), ours=False, kind=kind))
    runs = ranks2.run(train, str(tmp_path), kind=kind)
    assert together(runs)
    assert runs[0].scale == SCALE / 2
    assert runs[0].logs[-1]["loss_scale"] == SCALE / 2
    assert runs[0].logs[-1]["skipped_steps"] == 1


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_schedules_stay_on_a_skip_with_any_optimizer(ranks2, tmp_path, optim):
    (run, _) = ranks2.run(train, str(tmp_path), optim=optim)
    taken = [n - (n > FAULT) for n in range(STEPS)]
    assert run.rates == pytest.approx([0.01 * (1 - n / STEPS) for n in taken])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": 0.1, "optim": "adamw_torch_fused"}],
)
def test_without_an_overflow_the_run_is_the_trainers_to_the_bit(ranks2, tmp_path, arguments):
    ours = ranks2.run(train, str(tmp_path), fault=False, **arguments)
    theirs = ranks2.run(train, str(tmp_path), ours=False, fault=False, **arguments)
    assert [run.weights for run in ours] == [run.weights for run in theirs]
    assert [run.rates for run in ours] == [run.rates for run in theirs]


def test_a_hook_compresses_the_gradients(ranks2, tmp_path):
    mixin = {"comm_hook": "fp16", "scaler_settings": {"init_scale": SCALE}}
    hooked = ranks2.run(train, str(tmp_path), fault=False, mixin=mixin)
    plain = ranks2.run(train, str(tmp_path), fault=False)
    assert together(hooked)
    assert hooked[0].weights != plain[0].weights, "rounded on the way"
    assert hooked[0].weights == pytest.approx(plain[0].weights, rel=1e-3)


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_of_either_goes_on_in_the_other(
    ranks2, tmp_path: Path, first: bool, then: bool
):
    folder = str(tmp_path)
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, _ = ranks2.run(train, folder, ours=first, fault=False, **saving)
    state = torch.load(tmp_path / "checkpoint-3" / "scaler.pt")
    assert (state["scale"], state["_growth_tracker"]) == (SCALE, 3)
    (tmp_path / f"checkpoint-{STEPS}").rename(tmp_path / "last")
    resumed, _ = ranks2.run(train, folder, ours=then, fault=False, resume=True)
    assert resumed.global_step == STEPS
    assert resumed.weights == whole.weights


def test_at_bf16_the_mixin_changes_nothing(ranks2, tmp_path):
    run, _ = ranks2.run(train, str(tmp_path), precision="bf16", mixin={}, fault=False)
    assert run.scale == 0.0


def test_a_scaler_at_bf16_is_refused(ranks2, tmp_path):
    mixin = {"scaler_settings": {"init_scale": 2.0}}
    refused, _ = ranks2.run(refusal, train, str(tmp_path), precision="bf16", mixin=mixin)
    assert "mixed_precision is 'bf16'" in refused
