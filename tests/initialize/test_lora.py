"""peft's LoRA and DoRA on a frozen half base: trained on two ranks, saved and resumed."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from distamp import cast_model, initialize
from tests.ranks import RankPool, mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # as below
BF16, F32 = torch.bfloat16, torch.float32
STEPS = 4
IDS = torch.randint(0, 32, (STEPS, 4, 8), generator=torch.Generator().manual_seed(0))


def adapted(dora: bool, base: torch.dtype = BF16) -> Any:
    import peft
    import transformers

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(BF16).to(base)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that transformers has given new ones
        return peft.get_peft_model(model, lora)


def made(layout: str, level: str, dora: bool) -> Any:
    model = adapted(dora)
    if layout == "DDP":
        model = DistributedDataParallel(cast_model(model, level))
    else:
        policy = MixedPrecisionPolicy(BF16 if level == "bf16-O2" else None, F32)
        for part in (*model.base_model.model.model.layers, model):
            fully_shard(part, mesh=mesh((2,), ("shard",)), mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    return initialize(model, torch.optim.AdamW(trained, lr=0.01), level)


def train(amp: Any, steps: range) -> list[float]:
    """Losses; both ranks have the same batch, so that one process is the reference."""
    losses = []
    for step in steps:
        amp.zero_grad()
        with amp.autocast():
            loss = amp.model(input_ids=IDS[step], labels=IDS[step]).loss.float()
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        assert amp.step()
        losses.append(loss.item())
    return losses


def state_of(amp: Any) -> Any:
    parts = amp.model, amp.optimizers[0], amp
    return [copy.deepcopy(part.state_dict()) for part in parts]


def adapters(amp: Any) -> list[Tensor]:
    found = [p.detach() for p in amp.model.parameters() if p.requires_grad]
    return [getattr(p, "full_tensor", lambda p=p: p)().float() for p in found]


def saved_and_resumed(layout: str, level: str, dora: bool) -> Any:
    amp = made(layout, level, dora)
    losses = train(amp, range(2))
    state = state_of(amp)
    losses += train(amp, range(2, STEPS))
    resumed = made(layout, level, dora)
    resumed.model.load_state_dict(state[0])
    resumed.optimizers[0].load_state_dict(state[1])
    resumed.load_state_dict(state[2])
    same = train(resumed, range(2, STEPS)) == losses[2:]
    return losses, same and all(map(torch.equal, adapters(amp), adapters(resumed)))


def reference(dora: bool) -> list[float]:
    """The same in float32, from the weights that the half base has."""
    model = adapted(dora, F32)
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(initialize(model, torch.optim.AdamW(trained, lr=0.01), "O0"), range(STEPS))


@pytest.mark.parametrize(
    ("layout", "level", "dora"),
    [("DDP", "bf16-O2", False), ("FSDP2", "bf16", True)],
)
def test_adapters_train_and_go_on_to_the_bit(ranks2: RankPool, layout, level, dora):
    pytest.importorskip("peft")
    wanted = reference(dora)
    for losses, same in ranks2.run(saved_and_resumed, layout, level, dora):
        assert same
        assert losses == pytest.approx(wanted, rel=5e-3)
