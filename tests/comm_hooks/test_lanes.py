"""The threads of a host's lanes."""

import subprocess
import sys

ENDS = """
import time, torch
import torch.distributed as dist
from contextlib import suppress
from datetime import timedelta
from distamp.comm_hooks.lanes import HostLanes
from distamp.comm_hooks.stats import HookStats

class Slow:
    # What the interpreter ends with.
    def __del__(self, sleep=time.sleep):
        sleep(1)

def waits(lane):
    # In torch, as an exchange is.
    with suppress(dist.DistStoreError):
        dist.HashStore().wait(["never"], timedelta(seconds=0.5))
    return torch.ones(1)

torch.slow = Slow()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lanes = HostLanes("name", dist.group.WORLD, {"inner": [0], "outer": [0]}, HookStats())
lanes.submit(waits)
"""


def test_a_process_ends_while_a_lane_is_still_in_torch():
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
