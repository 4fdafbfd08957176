"""The Llama-shaped model of bench/small_llama.toml, trained by PyTorch itself: one rank, DDP or FSDP2 over Gloo.

Prints one JSON object: tokens_per_second and step_ms (median over the steps after the warm-up), processor_ms (processor time
of a step, over all ranks), process_memory_bytes (largest rank: the most that the process held, less what it held before its
model was built, as bench_sharded_step measures it).
    torchrun --nproc-per-node 2 bench/peers/train_ddp.py --engine ddp --steps 10
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

DIM, LAYERS, HEADS, FFN, VOCAB, SEQUENCE, BATCH = 256, 6, 8, 1024, 4096, 256, 8


def rotary_tables(length, width, theta=10000.0):
    angles = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, width, 2).float() / width))
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate_up, self.down = nn.Linear(DIM, 2 * FFN, bias=False), nn.Linear(FFN, DIM, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, DIM))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        cos, sin = rotary_tables(SEQUENCE, DIM // HEADS)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def resident_bytes(field):
    """VmRSS: now; VmHWM: the most since it was forgotten."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["none", "ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, os.cpu_count() // ranks))
    torch.manual_seed(1)
    if options.engine != "none":
        dist.init_process_group("gloo")
        dist.barrier()  # connects
    # Imported, so that what is measured is the model and not the code of the library.
    from torch.distributed.fsdp import fully_shard
    open("/proc/self/clear_refs", "w").write("5")  # forgets VmHWM
    before = resident_bytes("VmRSS")
    model = Llama()
    if options.engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    elif options.engine == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    seconds, processor = [], []
    for step in range(options.warmup + options.steps):
        tokens = torch.randint(VOCAB, (BATCH // ranks, SEQUENCE + 1), generator=generator)
        start, processor_start = time.perf_counter(), time.process_time()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - processor_start)
    held, busy = torch.tensor(resident_bytes("VmHWM") - before), torch.tensor(statistics.median(processor))
    if options.engine != "none":
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        dist.all_reduce(busy)
    if int(os.environ.get("RANK", "0")) == 0:
        median = statistics.median(seconds)
        print(json.dumps({"engine": options.engine, "ranks": ranks, "step_ms": median * 1e3,
                          "tokens_per_second": BATCH * SEQUENCE / median, "processor_ms": busy.item() * 1e3,
                          "process_memory_bytes": held.item(), "torch": torch.__version__}))
    if options.engine != "none":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
