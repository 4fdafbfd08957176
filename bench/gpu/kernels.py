"""Every CUDA kernel at the sizes of the models of bench/gpu, beside what the chip can do, and the limits that follow for a step.

    python3 bench/gpu/kernels.py --build build [--model llama_1_5b] [--json FILE] [--table FILE]
Needs a Python with torch 2.11, whose libraries the build was made against. Times are medians over replays of a CUDA graph of
several calls on buffers of their own, so that no cache holds what is read. Bytes are those that must be read and written once.
"copy" is torch's copy of as many bytes as a norm of that model reads: how near the peak a kernel of that length can come.
"""
import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "peers"))
from train_gpu import MODELS  # noqa: E402

BANDWIDTH, FLOPS = 4.8e12, {"bf16": 989e12, "fp8": 1979e12}  # of an H200, by its data sheet


def timed(calls, repeats=9):
    """Seconds of one of the calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # all kept, so that none is written over the one before
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    del results
    return sorted(times)[repeats // 2]


def random(*sizes, dtype=torch.bfloat16):
    return torch.randn(*sizes, device="cuda", dtype=dtype)


class Table:
    def __init__(self):
        self.rows, self.seconds = [], {}

    def note(self, model, name, seconds, amount, peak, unit):
        self.seconds[model, name] = seconds
        self.rows.append({"model": model, "kernel": name, "us": seconds * 1e6, unit: amount / seconds, "of_peak": amount / seconds / peak})
        shown = f"{amount / seconds * 1e-12:7.2f} {'TB/s' if unit == 'bytes_per_second' else 'TFLOP/s'}"
        print(f"{model:11s} {name:34s} {seconds * 1e6:9.1f} us {shown:>15s} {amount / seconds / peak:6.1%}", flush=True)

    def moves(self, model, name, sizes, call, moved, copies=4):
        buffers = [[random(*size) for size in sizes] for _ in range(copies)]
        self.note(model, name, timed([lambda b=b: call(*b) for b in buffers] * 2), moved, BANDWIDTH, "bytes_per_second")

    def multiplies(self, model, name, calls, flops, kind="bf16"):
        self.note(model, name, timed(calls), flops, FLOPS[kind], "flops")


def measure(table, model, ours):
    shape = MODELS[model]
    dim, ffn, heads, kv, vocab = (shape[key] for key in ("dim", "ffn", "heads", "kv_heads", "vocab"))
    rows, size, llama = shape["batch"] * shape["sequence"], dim // heads, shape["kind"] == "llama"
    packed, wide = (heads + 2 * kv) * size, 2 * ffn if llama else ffn
    weight, rstd = random(dim), torch.rand(rows, device="cuda")
    moved = rows * 2  # bytes of a column
    table.moves(model, "copy of [rows, dim]", [(rows, dim)] * 2, lambda out, x: out.copy_(x), moved * 2 * dim)
    factor = torch.ones((), device="cuda")
    table.moves(model, "scaled_into_", [(rows, dim)] * 2, lambda out, x: ours.scaled_into_(out, x, factor), moved * 2 * dim)
    if llama:
        table.moves(model, "rms_norm", [(rows, dim)], lambda x: ours.rms_norm(x, None, weight, 1e-5), moved * 2 * dim)
        table.moves(model, "rms_norm_backward, with the norm recomputed", [(rows, dim)] * 3,
                    lambda dy, ds, x: ours.rms_norm_backward(dy, ds, x, weight, rstd, True), moved * 5 * dim)
        cosine = torch.rand(shape["sequence"], size // 2, device="cuda")
        table.moves(model, "split_qkv_ (rotary in place)", [(shape["batch"], shape["sequence"], packed)],
                    lambda qkv: ours.split_qkv_(qkv, cosine, cosine, heads, kv), moved * 2 * (heads + kv) * size)
        table.moves(model, "turn_back_qkv_ (inverse rotary)", [(shape["batch"], shape["sequence"], packed)],
                    lambda qkv: ours.turn_back_qkv_(qkv, cosine, cosine, heads, kv), moved * 2 * (heads + kv) * size)
        table.moves(model, "swiglu", [(rows, wide)], ours.swiglu, moved * 3 * ffn)
        table.moves(model, "swiglu_backward_, with swiglu recomputed", [(rows, ffn), (rows, wide)], ours.swiglu_backward_, moved * 6 * ffn)
    else:
        table.moves(model, "layer_norm", [(rows, dim)], lambda x: ours.layer_norm(x, weight, weight, 1e-5), moved * 2 * dim)
        table.moves(model, "layer_norm_backward, with the norm recomputed and its result summed", [(rows, dim)] * 3,
                    lambda dy, ds, x: ours.layer_norm_backward(dy, ds, x, weight, rstd, rstd, weight, True), moved * 5 * dim)
        table.moves(model, "gelu", [(rows, ffn)], ours.gelu, moved * 2 * ffn)
        table.moves(model, "gelu_backward_, with gelu recomputed and the result summed", [(rows, ffn)] * 2, ours.gelu_backward_, moved * 4 * ffn)
        table.moves(model, "column_sums", [(rows, packed)], ours.column_sums, moved * packed)
        table.moves(model, "packed_attention_sums", [(shape["batch"], shape["sequence"], n) for n in (packed, dim)],
                    lambda d_qkv, d_out: ours.packed_attention_sums(d_qkv, d_out, heads, kv), moved * 2 * dim)
    target = torch.randint(vocab, (8192,), device="cuda")
    table.moves(model, "cross_entropy_, 8192 rows", [(8192, vocab)], lambda x: ours.cross_entropy_(x, target, -100), 8192 * vocab * 4, 2)
    history = torch.ones(16, device="cuda")
    for columns in (dim, wide):
        table.moves(model, f"fp8_quantize of {columns}, with transpose", [(rows, columns)],
                    lambda x: ours.fp8_quantize(x, history, None, 0, False, False, True, True), moved * 2 * columns, 3)
    tokens, embedding = torch.randint(vocab, (rows,), device="cuda"), torch.zeros(vocab, dim, device="cuda")
    table.moves(model, "embedding_add_, with sorting", [(rows, dim)], lambda x: ours.embedding_add_(embedding, tokens, x), rows * dim * 10)
    del embedding

    products = [("qkv", packed, dim), ("output", dim, dim), ("up", wide, dim), ("down", dim, ffn)]
    for name, out, inner in products:
        x, w, y = random(rows, inner), random(out, inner), random(rows, out)
        buffer, flops = torch.zeros(out, inner, device="cuda"), 2 * rows * out * inner
        table.multiplies(model, f"{name}: forward", [lambda: ours.product(x, w.t(), None, None)] * 4, flops)
        table.multiplies(model, f"{name}: input's gradient", [lambda: ours.product(y, w, None, None)] * 4, flops)
        table.multiplies(model, f"{name}: weight's gradient, fp32", [lambda: ours.product_into_(buffer, y.t(), x, False)] * 4, flops)
        one = torch.ones(1, device="cuda")
        x8, w8 = (t.to(torch.float8_e4m3fn) for t in (x, w))
        table.multiplies(model, f"{name}: forward, fp8", [lambda: ours.fp8_product_(y, x8, w8.t(), one, one, None, None, True)] * 4,
                         flops, "fp8")
        # The gradient's eight bits and the other operand's, each with the dimension that is summed over last.
        y8, back = y.to(torch.float8_e5m2), torch.empty_like(x)
        turned_x, turned_w, turned_y = (t.t().contiguous() for t in (x8, w8, y8))
        table.multiplies(model, f"{name}: input's gradient, fp8",
                         [lambda: ours.fp8_product_(back, y8, turned_w.t(), one, one, None, None, False)] * 4, flops, "fp8")
        table.multiplies(model, f"{name}: weight's gradient, fp8",
                         [lambda: ours.fp8_product_(buffer, turned_y, turned_x.t(), one, one, None, None, False)] * 4, flops, "fp8")
        del x, w, y, buffer, x8, w8, y8, back, turned_x, turned_w, turned_y
    head_rows = min(rows, 16384)
    x, w, y = random(head_rows, dim), random(vocab, dim), random(head_rows, vocab)
    buffer, flops = torch.zeros(vocab, dim, device="cuda"), 2 * head_rows * vocab * dim
    table.multiplies(model, "head: forward", [lambda: ours.product(x, w.t(), None, None)] * 2, flops)
    table.multiplies(model, "head: input's gradient", [lambda: ours.product(y, w, None, None)] * 2, flops)
    table.multiplies(model, "head: weight's gradient, fp32", [lambda: ours.product_into_(buffer, y.t(), x, False)] * 2, flops)
    del x, w, y, buffer

    qkv, d_out = (random(shape["batch"], shape["sequence"], n) for n in (packed, dim))
    flops = shape["batch"] * heads * shape["sequence"]**2 * size * 2  # two products, causal
    table.multiplies(model, "attention: forward", [lambda: ours.packed_attention(qkv, heads, kv, True)] * 3, flops)
    out, log_sums = ours.packed_attention(qkv, heads, kv, True)
    table.multiplies(model, "attention: backward",
                     [lambda: ours.packed_attention_backward(d_out, qkv, out, log_sums, heads, kv, True)] * 3, 2.5 * flops)
    return limits(table, model, rows, head_rows)


def limits(table, model, rows, head_rows):
    """Milliseconds of a step: library kernels back to back and AdamW's bytes; and with the bytes that the rest must move."""
    shape = MODELS[model]
    dim, ffn, heads, kv, vocab, layers = (shape[key] for key in ("dim", "ffn", "heads", "kv_heads", "vocab", "layers"))
    packed, llama = (heads + 2 * kv) * dim // heads, shape["kind"] == "llama"
    library = sum(seconds * (layers if not name.startswith("head") else rows / head_rows)
                  for (of, name), seconds in table.seconds.items()
                  if of == model and ":" in name and "fp8" not in name)
    in_blocks = layers * (packed * dim + dim * dim + (3 if llama else 2) * dim * ffn)
    parameters = in_blocks + (2 if llama else 1) * vocab * dim
    optimizer = parameters * 34 / BANDWIDTH  # four of fp32 read, three and a bf16 copy written; gradients read once more for their norm
    columns = layers * ((2 * 2 + 2 * 4) * dim + (8 if llama else 5) * ffn + (4 * (packed - kv * dim // heads) if llama else 2 * dim))
    rest = rows * 2 * (columns + 2 * vocab) / BANDWIDTH
    return {"library_ms": library * 1e3, "optimizer_ms": optimizer * 1e3, "rest_ms": rest * 1e3,
            "limit_ms": (library + optimizer) * 1e3, "limit_with_rest_ms": (library + optimizer + rest) * 1e3}


def markdown(table, bounds):
    """The table of bench/results/gpu_kernels.md."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in table.rows):
        lines += [f"## {model or 'All models'}", "| kernel | us | | of peak |", "|---|---|---|---|"]
        for row in (row for row in table.rows if row["model"] == model):
            bytes_moved = "bytes_per_second" in row
            speed = row["bytes_per_second" if bytes_moved else "flops"] * 1e-12
            shown = f"{speed:.2f} TB/s" if bytes_moved else f"{speed:.0f} TFLOP/s"
            lines.append(f"| {row['kernel']} | {row['us']:.1f} | {shown} | {row['of_peak']:.1%} |")
        if model in bounds:
            limit = bounds[model]
            lines += ["", f"Lower limits for a step, in ms: {limit['limit_ms']:.1f} for library kernels ({limit['library_ms']:.1f}) and AdamW's memory traffic; "
                      f"{limit['limit_with_rest_ms']:.1f} with the traffic of norms, activations, rotary embeddings and loss."]
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build", help="folder with libbonfire.so and libbonfire_cuda.so")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--table", help="file to write, in Markdown")
    options = parser.parse_args()
    for library in ("libbonfire.so.0", "libbonfire_cuda.so"):
        torch.ops.load_library(str(pathlib.Path(options.build).resolve() / library))
    table, bounds = Table(), {}
    a, b = (torch.empty(1 << 29, device="cuda") for _ in range(2))
    table.note("", "copy", timed([lambda: a.copy_(b)]), 2 * a.nbytes, BANDWIDTH, "bytes_per_second")
    ours = torch.ops.bonfire
    count = 1 << 28
    state = [torch.rand(count, device="cuda") for _ in range(4)]
    low = torch.zeros(count, device="cuda", dtype=torch.bfloat16)
    table.note("", "adam_, fp32 with a bf16 copy",
               timed([lambda: ours.adam_(*state, None, low, None, None, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1.0, True)]), count * 30, BANDWIDTH,
               "bytes_per_second")
    table.note("", "sum_of_squares", timed([lambda: ours.sum_of_squares(state[:1])]), count * 4, BANDWIDTH, "bytes_per_second")
    del a, b, state, low
    for model in options.model or MODELS:
        bounds[model] = measure(table, model, ours)
        print(model, {key: round(value, 2) for key, value in bounds[model].items()}, flush=True)
    if options.table:
        pathlib.Path(options.table).write_text(markdown(table, bounds))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"kernels": table.rows, "limits": bounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
