"""torchtitan's Trainer made to run on a CPU, with a tokenizer and text of its own."""

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.trainers.common import plant_inf

__all__ = ["config_for", "on_cpu"]

VOCABULARY = 256


def on_cpu() -> None:
    """Stand in for what torchtitan 0.3 has for accelerators alone, and let rank 1 overflow once."""
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.tools import utils
    from torchtitan.trainer import Trainer

    device = types.SimpleNamespace(
        set_device=lambda device: None,
        get_device_name=lambda *_: "CPU",
        get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 34),
        reset_peak_memory_stats=lambda *_: None,
        memory_stats=lambda *_: {},
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        current_device=lambda: 0,
        device_count=torch.cpu.device_count,
        is_available=lambda: False,
        get_rng_state=torch.get_rng_state,
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan"):
            for attribute, value in (("device_type", "cpu"), ("device_module", device)):
                if attribute in vars(module):
                    setattr(module, attribute, value)
    utils.get_local_device = lambda: torch.device("cpu")
    # FlexAttention has no backward pass on a CPU; the debug model's mask is the causal one.
    FlexAttention.forward = _causal
    # Of a torch that is newer than what is tried here.
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_, **__: None
    # As the train_step of torchtitan's main does since PR 4226, between clip and step.
    trainer = sys.modules[Trainer.__module__]
    utilities = types.SimpleNamespace(**vars(trainer.dist_utils))
    utilities.clip_grad_norm_ = _asserted(trainer.dist_utils.clip_grad_norm_)
    trainer.dist_utils = utilities
    original, steps = Trainer.forward_backward_step, [0]

    def with_fault(self: Any, **batch: Any) -> Tensor:
        loss: Tensor = original(self, **batch)
        plant_inf(self.model_parts[0].parameters(), steps[0])
        steps[0] += 1
        return loss

    Trainer.forward_backward_step = with_fault
    build = Trainer.Config.build

    def built(self: Any, **kwargs: Any) -> Any:
        trainer = build(self, **kwargs)
        for module in trainer.model_parts[0].modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other with a factor
        return trainer

    Trainer.Config.build = built


def _asserted(clip: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def clipped(*args: Any, **kwargs: Any) -> Tensor:
        norm = clip(*args, **kwargs)
        torch._assert_async(norm.isfinite(), "the norm of the gradients is not finite")
        return norm

    return clipped


def _causal(self: Any, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


def config_for(folder: str, steps: int) -> Callable[[Any], Any]:
    """A maker of configs of torchtitan's debug model, given the class to make."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry

    class Bytes(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str | None = None) -> None:
            super().__init__()
            self.eos_id = 0

        def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int], *_: Any, **__: Any) -> str:
            return bytes(ids).decode(errors="replace")

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Counting(BaseDataLoader):
        """Sequences that count up from anywhere."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
        ) -> None:
            self.generator = torch.Generator().manual_seed(dp_rank)
            self.shape = local_batch_size, seq_len

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            places = torch.arange(self.shape[1]).expand(self.shape).contiguous()
            while True:
                begin = torch.randint(VOCABULARY, (self.shape[0], 1), generator=self.generator)
                tokens = (begin + places) % VOCABULARY
                yield {"input": tokens, "positions": places}, (tokens + 1) % VOCABULARY

        def state_dict(self) -> dict[str, Any]:
            return {"generator": self.generator.get_state()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if state_dict:
                self.generator.set_state(state_dict["generator"])

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]  # of six
    optimizer = default_adamw(lr=8e-4)
    optimizer.implementation = "foreach"

    def make(cls: Any) -> Any:
        return cls(
            model_spec=spec,
            loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
            tokenizer=Bytes.Config(),
            dataloader=Counting.Config(),
            optimizer=optimizer,
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
            training=TrainingConfig(
                local_batch_size=2, seq_len=32, steps=steps, disable_cuda_graphs=True
            ),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            metrics=MetricsProcessor.Config(log_freq=1),
            checkpoint=CheckpointManager.Config(
                enable=True, interval=2, last_save_model_only=False
            ),
            dump_folder=folder,
        )

    return make
