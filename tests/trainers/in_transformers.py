"""Training in Hugging Face's Trainer and in TRL's, for ranks, as it imports transformers."""

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from distamp.integrations.transformers import DistTrainerMixin
from tests.trainers.common import FAULT, SCALE, STEPS, adapted, digest, fresh_accelerate, plant_inf
from tests.trainers.in_accelerate import make_fsdp_plugin

__all__ = ["make_model", "make_rows", "make_texts", "make_tokenizer", "train"]

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "<eos>"}
ARGUMENTS = {
    "use_cpu": True,
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


def make_model() -> Any:
    """Return a language model of a few thousand weights, the same on every rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 2,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token for each word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {}
    for token, word in enumerate(["<pad>", "<eos>", *WORDS]):
        vocabulary[word] = token
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def make_texts(count: int) -> list[str]:
    """Return texts of six consecutive words; each text starts one word later than the last."""
    texts = []
    for start in range(count):
        words = []
        for position in range(start, start + 6):
            words.append(WORDS[position % len(WORDS)])
        texts.append(" ".join(words))
    return texts


def make_rows(count: int) -> list[dict[str, list[int]]]:
    """Return the texts as rows of a data set, with their tokens as labels."""
    tokens = make_tokenizer()(make_texts(count))["input_ids"]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def _make_arguments(
    precision: str, layout: str, save: str | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``TrainingArguments``; ``arguments`` replace the defaults."""
    result = {**ARGUMENTS, **arguments}
    result["fp16"] = precision == "fp16"
    result["bf16"] = precision == "bf16"
    if save is not None:
        result["save_strategy"] = "steps"
        result["save_steps"] = STEPS // 2
    if layout != "DDP":
        make_fsdp_plugin(layout)  # The process counts as one with an accelerator.
        result["fsdp"] = True
        result["fsdp_config"] = {
            "version": 2,
            "cpu_ram_efficient_loading": False,
            "min_num_params": 10**9 if layout.startswith("LoRA") else 10,
        }
    return result


def _make_trainer_class(
    base: Any,
    run: SimpleNamespace,
    with_distamp: bool,
    fault: int | None,
    value: float,
) -> Any:
    """Return a trainer class of which rank 1 overflows in one step, and that fills ``run``."""

    class FaultyTrainer(base):
        steps = 0

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            if self.accelerator.sync_gradients:
                plant_inf(model.parameters(), self.steps, fault, value)
            self.steps += 1
            return loss

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs, *args, **kwargs)
            if "loss" in logs:
                run.rates.append(self.lr_scheduler.get_last_lr()[0])
                if self.args.max_grad_norm > 0:
                    run.norms.append(float(logs["grad_norm"]))
                run.skipped.append(self.accelerator.optimizer_step_was_skipped)
                run.weights.append(digest(self.model))

    class DistampTrainer(DistTrainerMixin, FaultyTrainer):
        pass

    class TorchTrainer(FaultyTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # A Trainer makes no scaler on a CPU.
            if self.args.fp16:
                self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
                self.accelerator.native_amp = True

    return DistampTrainer if with_distamp else TorchTrainer


def train(
    with_distamp: bool = True,
    precision: str = "fp16",
    layout: str = "DDP",
    fault: int | None = FAULT,
    value: float = float("inf"),
    clip: float = 0.0,
    comm_hook: str | None = None,
    load: str | None = None,
    save: str | None = None,
    by_trl: bool = False,
    **arguments: Any,
) -> SimpleNamespace:
    """Train by a Trainer; return the observations of each logged step.

    Args:
        with_distamp: Use distamp's scaler; otherwise torch's.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``.
        layout: ``"DDP"``, ``"FSDP2"`` or ``"LoRA on FSDP2"``.
        fault: The step in which rank 1 alone overflows.
        value: The gradient of rank 1 in that step.
        clip: The norm to which gradients are clipped; 0 for no clipping.
        comm_hook: The format of gradients on the wire.
        load: The folder of a checkpoint of half of the steps to continue from.
        save: A folder for a checkpoint after half of the steps.
        by_trl: Use TRL's SFTTrainer.
        arguments: More of ``TrainingArguments``.
    """
    fresh_accelerate()
    base_class: Any = transformers.Trainer
    arguments_class: Any = transformers.TrainingArguments
    trainer_arguments: dict[str, Any] = {"train_dataset": make_rows(48)}
    if by_trl:
        import trl
        from datasets import Dataset

        base_class, arguments_class = trl.SFTTrainer, trl.SFTConfig
        trainer_arguments["train_dataset"] = Dataset.from_dict({"text": make_texts(48)})
        trainer_arguments["processing_class"] = make_tokenizer()
    if with_distamp:
        settings = {"init_scale": SCALE} if precision == "fp16" else {}
        trainer_arguments["scaler_settings"] = settings
        trainer_arguments["comm_hook"] = comm_hook
    run = SimpleNamespace(weights=[], skipped=[], norms=[], rates=[])
    trainer_class = _make_trainer_class(base_class, run, with_distamp, fault, value)
    all_arguments = _make_arguments(precision, layout, save, arguments)
    checkpoint = None if load is None else f"{load}/checkpoint-{STEPS // 2}"
    with tempfile.TemporaryDirectory() as folder:
        args = arguments_class(save or folder, max_grad_norm=clip, **all_arguments)
        model = adapted(layout, make_model(), "q_proj", "v_proj")
        trainer = trainer_class(model=model, args=args, **trainer_arguments)
        trainer.train(resume_from_checkpoint=checkpoint)

    last_log = [log for log in trainer.state.log_history if "loss" in log][-1]
    run.logged = [last_log.get(name) for name in ("loss_scale", "skipped_steps")]
    scaler = trainer.accelerator.scaler
    scaler_state = scaler.state_dict() if scaler else {}
    run.scale = scaler_state.get("scale")
    run.growth = scaler_state.get("_growth_tracker")
    return run
