"""Hugging Face's Trainer with distamp's scaler, beside torch's; TRL's is in `cells`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainers.common import FAULT, digest, fresh_accelerate, needs, plant_inf, quiet, together
from tests.trainers.test_accelerate import fsdp_plugin

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("hugging_face")]
needs("accelerate", "transformers")

SCALE = 2.0**10
STEPS = 6
WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]


ARGUMENTS = {
    "use_cpu": True,
    "bf16": False,
    "fp16": True,
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
    value: float = float("inf"),
    mixin: dict[str, Any] | None = None,
    resume: bool = False,
    model: Any = None,
    by_trl: bool = False,
    smallest: int | None = None,
    **arguments: Any,
) -> Any:
    """A run of STEPS steps; rank 1 overflows in one. FSDP2 shards what has ``smallest`` weights."""
    quiet()
    fresh_accelerate()
    if smallest is not None:
        fsdp_plugin(2)  # as on an accelerator
        config = {"version": 2, "cpu_ram_efficient_loading": False, "min_num_params": smallest}
        arguments |= {"fsdp": True, "fsdp_config": config}
    import transformers

    from distamp.integrations.transformers import DistTrainerMixin

    kind: Any = transformers.Trainer
    arguments_of: Any = transformers.TrainingArguments
    rows: Any = [{"input_ids": ids, "labels": ids} for ids in tokenizer()(texts(48))["input_ids"]]
    given: dict[str, Any] = {}
    if by_trl:
        import trl
        from datasets import Dataset

        kind, arguments_of, given = trl.SFTTrainer, trl.SFTConfig, {"processing_class": tokenizer()}
        rows = Dataset.from_dict({"text": texts(48)})
    run = SimpleNamespace(steps=[], skipped=[], norms=[], rates=[], schedule=[])

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
                run.rates.append(logs["learning_rate"])
                run.schedule.append(self.lr_scheduler.last_epoch)
                run.norms.append(logs.get("grad_norm"))
                run.skipped.append(self.accelerator.optimizer_step_was_skipped)
                run.steps.append(digest(self.model))

    class Ours(DistTrainerMixin, Faulty):
        pass

    class Theirs(Faulty):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if self.args.fp16:  # a Trainer makes no scaler on a CPU
                self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
                self.accelerator.native_amp = True

    args = arguments_of(folder, **(ARGUMENTS | arguments))
    given |= ({"scaler_settings": {"init_scale": SCALE}} | (mixin or {})) if ours else {}
    trainer = (Ours if ours else Theirs)(
        model=model or net(), args=args, train_dataset=rows, **given
    )
    trainer.train(resume_from_checkpoint=resume or None)
    logs = [each for each in trainer.state.log_history if "loss" in each]
    run.told = [logs[-1].get(name) for name in ("loss_scale", "skipped_steps")]
    run.weights, run.global_step = digest(trainer.model), trainer.state.global_step
    run.scale = trainer.accelerator.scaler and trainer.accelerator.scaler.get_scale()
    return run


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


def test_ranks_skip_together_under_a_hook_too_and_rates_and_logs_know_it(ranks2, tmp_path):
    mixin = {"comm_hook": "fp16"}
    (hooked, other), (plain, _) = (
        ranks2.run(train, str(tmp_path), **given) for given in ({"mixin": mixin}, {})
    )
    assert together([hooked, other])
    assert hooked.told == [hooked.scale, 1] == [SCALE / 2, 1]
    taken = [n - (n > FAULT) for n in range(STEPS)]
    assert hooked.rates == pytest.approx([0.01 * (1 - n / STEPS) for n in taken])
    assert hooked.weights != plain.weights, "rounded on the way"
    assert hooked.weights == pytest.approx(plain.weights, rel=1e-3)


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


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_a_checkpoint_in_bf16_goes_on_in_the_other_too(
    ranks2, tmp_path: Path, first: bool, then: bool
):
    given = {"fault": None, "fp16": False, "bf16": True, "mixin": {"scaler_settings": {}}}
    given |= {"save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.0}
    whole, _ = ranks2.run(train, str(tmp_path), ours=first, **given)
    (tmp_path / f"checkpoint-{STEPS}").rename(tmp_path / "last")
    resumed, _ = ranks2.run(train, str(tmp_path), ours=then, resume=True, **given)
    assert resumed.weights == whole.weights


def test_bases_in_the_other_order_are_refused():
    """The Trainer's own methods would hide the mixin's, without a word."""
    from transformers import Trainer

    from distamp.integrations.transformers import DistTrainerMixin

    with pytest.raises(TypeError, match=r"write class Mine\(DistTrainerMixin, Trainer\)"):
        type("Mine", (Trainer, DistTrainerMixin), {})
