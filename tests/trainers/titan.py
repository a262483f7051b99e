"""torchtitan's Trainer, changed to run on a CPU with small data."""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.trainers.common import plant_inf

__all__ = ["config_for", "on_cpu"]

VOCABULARY = 256


def on_cpu() -> None:
    """Replace the accelerator of torchtitan 0.3 by the CPU, and let rank 1 overflow once."""
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
    # torchtitan needs this function of a newer torch.
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


def _batches(dp_rank: int, dp_world_size: int, seq_len: int, **given: Any) -> Any:
    """Sequences that count up from anywhere."""
    from torchtitan.components.dataloader import ParallelAwareDataloader

    begins = torch.randint(VOCABULARY, (64, 1), generator=torch.Generator().manual_seed(dp_rank))
    places = torch.arange(seq_len)
    tokens = (begins + places) % VOCABULARY
    rows = [({"input": row, "positions": places}, (row + 1) % VOCABULARY) for row in tokens]
    size = given["local_batch_size"]
    return ParallelAwareDataloader(rows, dp_rank, dp_world_size, batch_size=size)


def config_for(folder: str, steps: int) -> Callable[[Any], Any]:
    """A maker of configs of torchtitan's debug model, given the class to make."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]  # of six
    optimizer = default_adamw(lr=8e-4)
    optimizer.implementation = "foreach"

    def make(cls: Any) -> Any:
        return cls(
            model_spec=spec,
            loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
            tokenizer=types.SimpleNamespace(build=lambda **_: None),
            dataloader=types.SimpleNamespace(build=_batches),
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
