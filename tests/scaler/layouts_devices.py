"""Models that lie on several devices of one process. On the CPU they are as any other."""

import torch
from torch import Tensor, nn

from tests.place import here
from tests.scaler.layouts_base import DDP, Alone, Layout
from tests.scaler.layouts_dtypes import ALL_LAYOUTS
from tests.scaler.reference import Net

__all__ = ["DEVICE_LAYOUTS", "layout_named"]


class _SpreadNet(Net):
    """The second half may lie on another device than the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = x.to(self.head.weight.device)
        return self.tail(torch.tanh(self.head(x)))


class _Spread(Layout):
    def make_net(self) -> nn.Module:
        return _SpreadNet(*self.widths)

    def place(self, net: nn.Module) -> nn.Module:
        net = super().place(net)
        if (device := here()).type != "cpu":
            count = torch.accelerator.device_count()
            other = torch.device(device.type, (device.index + count // 2) % count)
            net.head.to(other)
            net.tail.to(other)
        return net


class TwoDevices(_Spread, Alone):
    pass


class DDPTwoDevices(_Spread, DDP):
    """DistributedDataParallel of a module that lies on two devices of each rank."""


DEVICE_LAYOUTS: dict[str, type[Layout]] = {
    "two devices": TwoDevices,
    "DDP, two devices": DDPTwoDevices,
}


def layout_named(name: str) -> type[Layout]:
    """The layout of this name, of `ALL_LAYOUTS` or of these."""
    return ALL_LAYOUTS.get(name) or DEVICE_LAYOUTS[name]
