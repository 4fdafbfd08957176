"""docs/from_pytorch.md names every argument and public method of PyTorch's wrappers, as PyTorch itself lists them."""
import inspect
import re
import unittest

import torch.distributed.fsdp as fsdp
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from probe import ROOT


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def methods(kind):
    return [name for name in vars(kind) if not name.startswith("_")]


class Options(unittest.TestCase):
    def setUp(self):
        page = (ROOT / "docs" / "from_pytorch.md").read_text()
        self.sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page, re.M | re.S))

    def check(self, section, names):
        words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", self.sections[section]))))
        self.assertGreater(len(names), 5)
        self.assertEqual([name for name in names if name not in words], [])

    def test_ddp(self):
        self.check("DistributedDataParallel", [
            *arguments(DistributedDataParallel), *methods(DistributedDataParallel), *arguments(DistributedDataParallel.join),
            *(kind.name for kind in DDPCommHookType if not kind.name.endswith("RANK2"))])

    def test_fsdp1(self):
        wrapper = fsdp.FullyShardedDataParallel
        self.check("FullyShardedDataParallel (FSDP1)", [
            *arguments(wrapper), *methods(wrapper), *(kind.name for kind in fsdp.ShardingStrategy),
            *(kind.name for kind in fsdp.BackwardPrefetch), *(kind.name for kind in fsdp.StateDictType),
            *arguments(fsdp.MixedPrecision), *arguments(fsdp.CPUOffload), *arguments(ShardedGradScaler),
            *(name for name in arguments(wrapper.summon_full_params) if name != "module"),
            *arguments(wrapper.clip_grad_norm_)])

    def test_fsdp2(self):
        self.check("fully_shard (FSDP2)", [
            *arguments(fsdp.fully_shard), *methods(fsdp.FSDPModule), *arguments(fsdp.MixedPrecisionPolicy),
            *arguments(fsdp.CPUOffloadPolicy), "OffloadPolicy", "register_fsdp_forward_method", "UnshardHandle", "share_comm_ctx"])


if __name__ == "__main__":
    unittest.main()
