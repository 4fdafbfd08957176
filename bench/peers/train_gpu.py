"""The models of bench/gpu, trained by PyTorch itself on one GPU: bf16 products under autocast, fp32 parameters, fused AdamW,
clipping by norm. What PyTorch's own documentation recommends and nothing of ours: eager, or torch.compile of the whole model.

Prints one JSON object: step_ms (median), steps_ms, tokens_per_second (of the median step), peak_memory_bytes, losses.
    python3 bench/peers/train_gpu.py --model llama_1_5b --compile --steps 10
"""
import argparse
import json
import statistics

import torch
import torch.nn.functional as F
from torch import nn

MODELS = {
    "llama_1_5b": dict(kind="llama", dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256, sequence=4096, batch=4),
    "llama_162m": dict(kind="llama", dim=768, layers=12, heads=12, kv_heads=12, ffn=2048, vocab=50304, sequence=1024, batch=64),
    "gpt2_124m": dict(kind="gpt2", dim=768, layers=12, heads=12, kv_heads=12, ffn=3072, vocab=50304, sequence=1024, batch=64),
}


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        dim, ffn = shape["dim"], shape["ffn"]
        self.heads, self.kv_heads, self.size = shape["heads"], shape["kv_heads"], dim // shape["heads"]
        self.gated = shape["kind"] == "llama"
        bias = not self.gated
        norm = (lambda: nn.RMSNorm(dim, eps=1e-5)) if self.gated else (lambda: nn.LayerNorm(dim))
        self.attention_norm, self.feed_norm = norm(), norm()
        self.qkv = nn.Linear(dim, (self.heads + 2 * self.kv_heads) * self.size, bias=bias)
        self.output = nn.Linear(dim, dim, bias=bias)
        self.up = nn.Linear(dim, 2 * ffn if self.gated else ffn, bias=bias)
        self.down = nn.Linear(ffn, dim, bias=bias)

    def forward(self, x, cos, sin):
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, dim))
        wide = self.up(self.feed_norm(x))
        if self.gated:
            gate, up = wide.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(wide, approximate="tanh"))


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.kind, dim, sequence = shape["kind"], shape["dim"], shape["sequence"]
        self.tokens = nn.Embedding(shape["vocab"], dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape["layers"]))
        self.head = nn.Linear(dim, shape["vocab"], bias=False)
        if self.kind == "gpt2":
            self.positions, self.norm = nn.Embedding(sequence, dim), nn.LayerNorm(dim)
            self.head.weight = self.tokens.weight
        else:
            self.norm = nn.RMSNorm(dim, eps=1e-5)
            size = dim // shape["heads"]
            angles = torch.outer(torch.arange(sequence).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
            self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1).bfloat16(), persistent=False)
            self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1).bfloat16(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        # The residual stream in bf16, as Bonfire has it: autocast would leave it in fp32.
        x = self.tokens(tokens).bfloat16()
        if self.kind == "gpt2":
            x = x + self.positions.weight[:tokens.shape[1]].bfloat16()
        cos, sin = (None, None) if self.kind == "gpt2" else (self.cos, self.sin)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    shape = MODELS[options.model]
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Model(shape)
    forward = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(1)
    count = options.warmup + options.steps
    batches = [torch.randint(shape["vocab"], (shape["batch"], shape["sequence"] + 1), generator=generator).cuda() for _ in range(count)]
    # The host waits for nothing between steps, as Bonfire's does not: their times are those of events on the GPU.
    marks, losses = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)], []
    marks[0].record()
    for step, tokens in enumerate(batches):
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        marks[step + 1].record()
        if step < options.warmup:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    losses = [loss.item() for loss in losses]
    seconds = [before.elapsed_time(after) * 1e-3 for before, after in zip(marks, marks[1:])][options.warmup:]
    median = statistics.median(seconds)
    print(json.dumps({"model": options.model, "compiled": options.compile, "step_ms": median * 1e3,
                      "steps_ms": [round(s * 1e3, 3) for s in seconds],
                      "tokens_per_second": shape["batch"] * shape["sequence"] / median,
                      "peak_memory_bytes": torch.cuda.max_memory_allocated(), "losses": losses, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
