"""Runs in Hugging Face's Trainer and in TRL's, for ranks: to import this imports transformers."""

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from distamp.integrations.transformers import DistTrainerMixin
from tests.trainers.common import FAULT, SCALE, STEPS, adapted, digest, fresh_accelerate, plant_inf
from tests.trainers.in_accelerate import fsdp_plugin

__all__ = ["net", "texts", "tokenizer", "train"]

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


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


def net() -> Any:
    """A language model of a few thousand weights, from a config."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = transformers.LlamaConfig(vocab_size=len(WORDS) + 2, **sizes, **heads, **ends)
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    """Words to numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: n for n, word in enumerate(["<pad>", "<eos>", *WORDS])}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = Whitespace()
    ends = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **ends)


def texts(count: int) -> list[str]:
    return [" ".join(WORDS[(n + k) % len(WORDS)] for k in range(6)) for n in range(count)]


def train(
    ours: bool = True,
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
) -> Any:
    """A run that is saved after half of its steps, or goes on from there."""
    fresh_accelerate()
    arguments |= {each: each == precision for each in ("fp16", "bf16")}
    arguments |= {"save_strategy": "steps", "save_steps": STEPS // 2} if save else {}
    if layout != "DDP":
        fsdp_plugin(layout)  # as on an accelerator
        config = {"version": 2, "cpu_ram_efficient_loading": False}
        config["min_num_params"] = 10**9 if layout.startswith("LoRA") else 10
        arguments |= {"fsdp": True, "fsdp_config": config}
    kind: Any = transformers.Trainer
    arguments_of: Any = transformers.TrainingArguments
    rows: Any = [{"input_ids": ids, "labels": ids} for ids in tokenizer()(texts(48))["input_ids"]]
    given: dict[str, Any] = {}
    if by_trl:
        import trl
        from datasets import Dataset

        kind, arguments_of, given = trl.SFTTrainer, trl.SFTConfig, {"processing_class": tokenizer()}
        rows = Dataset.from_dict({"text": texts(48)})
    run = SimpleNamespace(weights=[], skipped=[], norms=[], rates=[])

    class Faulty(kind):
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
                run.norms += [float(logs["grad_norm"])] if clip else []
                run.skipped.append(self.accelerator.optimizer_step_was_skipped)
                run.weights.append(digest(self.model))

    class Ours(DistTrainerMixin, Faulty):
        pass

    class Theirs(Faulty):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if self.args.fp16:  # a Trainer makes no scaler on a CPU
                self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
                self.accelerator.native_amp = True

    if ours:
        settings = {"init_scale": SCALE} if precision == "fp16" else {}
        given |= {"scaler_settings": settings, "comm_hook": comm_hook}
    with tempfile.TemporaryDirectory() as folder:
        args = arguments_of(save or folder, max_grad_norm=clip, **(ARGUMENTS | arguments))
        model = adapted(layout, net(), "q_proj", "v_proj")
        trainer = (Ours if ours else Theirs)(model=model, args=args, train_dataset=rows, **given)
        trainer.train(resume_from_checkpoint=load and f"{load}/checkpoint-{STEPS // 2}")
    logs = [each for each in trainer.state.log_history if "loss" in each]
    run.told = [logs[-1].get(name) for name in ("loss_scale", "skipped_steps")]
    state = trainer.accelerator.scaler.state_dict() if trainer.accelerator.scaler else {}
    run.scale, run.growth = state.get("scale"), state.get("_growth_tracker")
    return run
