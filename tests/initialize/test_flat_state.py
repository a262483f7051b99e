"""One flat dict of weights and optimizer state, which any level and layout goes on from."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distamp import Precision, SettingError, cast_model, initialize
from distamp.initialize import Amp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


SPLIT = Precision.of("bf16-O2", master_weights="split")


def trained(level: str | Precision, seed: int, steps: int = 3) -> Amp:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    cast_model(model, level)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = initialize(model, optimizer, level)
    for index in range(steps):
        step(amp, index)
    return amp


def step(amp: Amp, index: int) -> None:
    amp.zero_grad()
    with amp.autocast():
        outputs = amp.model(torch.randn(16, 16, generator=torch.Generator().manual_seed(index)))
    amp.backward(outputs.float().square().mean())
    amp.step()


def assert_same(found: Amp, wanted: Amp) -> None:
    expected = wanted.flat_state_dict()
    assert found.flat_state_dict().keys() == expected.keys()
    for name, tensor in found.flat_state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


def save(amp: Amp, path: Path) -> None:
    dcp.save(amp.flat_state_dict(), checkpoint_id=path)


def load(amp: Amp, path: Path) -> None:
    reader = dcp.FileSystemReader(path)
    state = amp.flat_state_dict(reader.read_metadata().state_dict_metadata)
    dcp.load(state, storage_reader=reader)
    amp.load_flat_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after"),
    [("O0", "O0"), ("O0", "O2"), ("O2", "bf16"), ("O2", "O2"), ("fp8", "bf16"), ("bf16", "fp8")],
)
def test_any_level_has_what_another_stepped(tmp_path, before, after):
    if "fp8" in (before, after):
        pytest.importorskip("torchao")
    saved, fresh = trained(before, 0), trained(after, 1, steps=0)
    save(saved, tmp_path)
    load(fresh, tmp_path)
    expected, found = saved.flat_state_dict(), fresh.flat_state_dict()
    assert found.keys() == expected.keys()
    assert sum("exp_avg_sq" in name for name in found) == 6
    for name, tensor in expected.items():
        if tensor.dtype == found[name].dtype:  # a batch norm's may stay in fp32
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
    for parameter, stepped in zip(
        fresh.model.parameters(), fresh.optimizers[0].param_groups[0]["params"], strict=True
    ):
        assert parameter.equal(stepped.to(parameter.dtype))


def test_run_that_was_saved_goes_on_as_one_that_was_not(tmp_path):
    save(trained("O2", 0, steps=2), tmp_path)
    resumed = trained("O2", 1, steps=0)
    load(resumed, tmp_path)
    resumed.scaler.load_state_dict(trained("O2", 0, steps=2).scaler.state_dict())
    step(resumed, 2)
    assert_same(resumed, trained("O2", 0))


def test_split_masters_go_on_to_the_bit_and_whole_ones_load_them(tmp_path):
    saved = trained(SPLIT, 0, steps=2)
    weight = saved.flat_state_dict()["model.0.weight"]
    assert weight.dtype == torch.float32
    assert not weight.equal(weight.bfloat16().float())
    save(saved, tmp_path)
    resumed, whole = trained(SPLIT, 1, steps=0), trained("bf16-O2", 1, steps=0)
    load(resumed, tmp_path)
    load(whole, tmp_path)
    assert_same(whole, saved)
    step(resumed, 2)
    assert_same(resumed, trained(SPLIT, 0))


def test_what_has_no_name_is_refused():
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    amp = initialize(model, torch.optim.SGD([*model.parameters(), temperature], lr=1.0), "O0")
    with pytest.raises(SettingError, match="no model of initialize"):
        amp.flat_state_dict()


def fsdp1() -> str:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    amp = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), "O0")
    with pytest.raises(SettingError) as refused:
        amp.flat_state_dict()
    return str(refused.value)


def test_shares_without_a_name_are_refused_on_every_rank(ranks2):
    assert all("fully_shard" in said for said in ranks2.run(fsdp1))
