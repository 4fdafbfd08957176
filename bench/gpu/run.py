"""Compares Bonfire with PyTorch on one GPU: three models, each with the same shape, batch, precision, optimizer and clipping.

    python3 bench/gpu/run.py --build build [--repeats 2] [--steps 10] [--model llama_1_5b] [--without eager] [--all-breakdowns]
Runs are interleaved, so that other load on the machine affects all programs; the first steps of each are not counted. Bonfire runs as
`bonfire bench step`, the loop of `bonfire train`. One more run of each program records its kernels (libkernel_times.so). The lower
limits come from kernels.py, which runs at the end. Writes gpu_models.json and gpu_models.md to --results.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent / "peers"))
from train_gpu import MODELS  # noqa: E402

PEAK = 989e12
KINDS = [("matrix products, with fused activations", r"nvjet|gemm|cutlass|splitK|cublas|edge_kernel"), ("attention", r"sdpa|flash|fmha|cudnn"),
         ("optimizer, gradient norm", r"[Aa]dam|squares|sum_kernel|multi_tensor|lpnorm"),
         ("loss", r"cross_entropy|streamed_kernel|log_softmax|nll_loss"), ("rounding to fp8", r"quantize|magnitude"), ("copies and fills", r"^(copy|fill)$"),
         ("norms, activations, rotary, rest", r"")]
# What Bonfire is told beside its file: to keep what there is memory for, within what torch.compile takes; for the largest
# model, that gradients are kept as the products round them, in bf16, as autocast leaves them in PyTorch.
SETTINGS = {"llama_1_5b": {"train.microbatch": 4, "train.gradient_precision": "bf16", "train.keep_for_backward": "activations"},
            "llama_162m": {"train.keep_for_backward": "all"}, "gpt2_124m": {"train.keep_for_backward": "all"}}
WIDE = {"train.microbatch": 4}  # gradients in fp32, norms and activations made again
ONCE = ("PyTorch eager", "Bonfire bf16, gradients in fp32")  # beside the comparison: one run is enough


def flops(model):
    """Of a step: three times forward. Forward: two for each weight of a product and token, and attention's two causal products.
    Neither the embedding nor anything that is made again in backward counts."""
    shape = MODELS[model]
    dim, ffn, size = shape["dim"], shape["ffn"], shape["dim"] // shape["heads"]
    block = dim * (shape["heads"] + 2 * shape["kv_heads"]) * size + dim * dim + (3 if shape["kind"] == "llama" else 2) * dim * ffn
    attention = 2 * dim * shape["sequence"]  # 4 dim sequence, half of it masked
    tokens = shape["batch"] * shape["sequence"]
    return 3 * tokens * (2 * (shape["layers"] * block + shape["vocab"] * dim) + shape["layers"] * attention)


def programs(options, model):
    def ours(precision, settings):
        words = [word for key, value in {**settings, "train.precision": precision}.items() for word in ("--set", f"{key}={value}")]
        return [str(options.build / "bonfire"), "bench", "step", str(HERE / f"{model}.toml"), "--steps", str(options.steps), *words, "--json"]

    peer = [sys.executable, str(HERE.parent / "peers" / "train_gpu.py"), "--model", model, "--steps", str(options.steps)]
    all_of_them = {"Bonfire bf16": ours("bf16", SETTINGS[model]), "torch.compile": [*peer, "--compile"],
                   "Bonfire fp8": ours("fp8", SETTINGS[model]), "PyTorch eager": peer}
    if model == "llama_1_5b":
        all_of_them["Bonfire bf16, gradients in fp32"] = ours("bf16", WIDE)
    return {name: command for name, command in all_of_them.items() if not any(word in name for word in options.without)}


def run(command, **environment):
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    if ended.returncode != 0:
        print(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}", flush=True)
        return None
    return json.loads(ended.stdout[ended.stdout.index("{"):])


def breakdown(options, name, command):
    path = options.results / "kernel_times.json"
    path.unlink(missing_ok=True)
    run(command, KERNEL_TIMES=str(path), CUDA_INJECTION64_PATH=str(options.build / "libkernel_times.so"))
    if not path.exists():
        return None
    times, kinds = json.loads(path.read_text()), {kind: 0.0 for kind, _ in KINDS}
    path.unlink()
    for kernel in times["kernels"]:
        kinds[next(kind for kind, pattern in KINDS if re.search(pattern, kernel["name"]))] += kernel["ms"]
    return {"step_ms": times["step_ms"], "idle_ms": times["idle_ms"], "kinds": kinds, "kernels": times["kernels"][:60]}


def table(model, results, limits):
    tokens = MODELS[model]["batch"] * MODELS[model]["sequence"]
    compiled = results.get("torch.compile", {}).get("runs")
    base = statistics.median(run["step_ms"] for run in compiled) if compiled else None
    lines = [f"## {model}", "", "| | tokens/s | step, ms: median of runs | smallest | largest | relative to torch.compile | MFU | peak memory, GiB |",
             "|---|---|---|---|---|---|---|---|"]
    for name, result in results.items():
        steps = [run["step_ms"] for run in result["runs"]]
        if not steps:
            continue
        step = statistics.median(steps)
        memory = max(run["peak_memory_bytes"] for run in result["runs"]) / 2**30
        lines.append(f"| {name} | {tokens / step * 1e3:,.0f} | {step:.2f} | {min(steps):.2f} | {max(steps):.2f} | "
                     f"{f'{base / step:.3f}' if base else ''} | {flops(model) / step / PEAK * 1e3:.1%} | {memory:.2f} |")
    if limits:
        lines += ["", f"Lower limits in bf16: {limits['limit_ms']:.1f} ms ({tokens / limits['limit_ms'] * 1e3:,.0f} tokens/s) for library kernels back "
                  f"to back and AdamW's memory traffic; {limits['limit_with_rest_ms']:.1f} ms ({tokens / limits['limit_with_rest_ms'] * 1e3:,.0f}) with the "
                  "traffic of norms, activations, rotary embeddings and loss."]
    shown = {name: result["breakdown"] for name, result in results.items() if result.get("breakdown")}
    if shown:
        lines += ["", "| ms per step | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
        for kind, _ in KINDS:
            lines.append(f"| {kind} | " + " | ".join(f"{of['kinds'][kind]:.1f}" for of in shown.values()) + " |")
        lines.append("| idle | " + " | ".join(f"{of['idle_ms']:.1f}" for of in shown.values()) + " |")
    return [*lines, ""]


def write(options, results, limits):
    machine = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                             text=True).stdout.strip()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = ["# Three models on one GPU, compared with PyTorch", "",
             f"{options.repeats} interleaved runs of {options.steps} steps each; the figure of a run is the median of its steps. {machine}; commit {commit}.",
             "MFU: three times the forward FLOPs (two per weight and token in matrix products, plus causal attention; without the "
             "embedding), relative to 989 TFLOP/s of bf16, also for fp8.", ""]
    for model in results:
        lines += table(model, results[model], limits.get(model))
    lines += ["Commands:", "```sh", *(result["command"] for model in results for result in results[model].values()), "```", ""]
    (options.results / "gpu_models.md").write_text("\n".join(lines))
    (options.results / "gpu_models.json").write_text(json.dumps({"machine": machine, "commit": commit, "limits": limits, "models": results},
                                                                indent=1) + "\n")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--results", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--without", action="append", default=[], help="leave out programs whose name has this word")
    parser.add_argument("--all-breakdowns", action="store_true", help="of PyTorch's kernels too")
    parser.add_argument("--limits", type=pathlib.Path, help="what kernels.py wrote; otherwise it is run")
    options = parser.parse_args()
    options.build = options.build.resolve()
    options.results.mkdir(exist_ok=True, parents=True)
    models, results = options.model or list(MODELS), {}
    for model in models:
        commands = programs(options, model)
        results[model] = {name: {"command": " ".join(command), "runs": []} for name, command in commands.items()}
        for repeat in range(options.repeats):
            for name, command in commands.items():
                if repeat and name in ONCE:
                    continue
                measured = run(command)
                if measured:
                    results[model][name]["runs"].append(measured)
                    print(f"{model} {repeat + 1}/{options.repeats}  {name}: {measured['step_ms']:.2f} ms", flush=True)
        for name, command in commands.items():
            if (name.startswith("Bonfire") and name not in ONCE) or options.all_breakdowns:
                results[model][name]["breakdown"] = breakdown(options, name, command)
        write(options, results, {})  # what there is, should the rest not come to its end
    limits = {}
    path = options.limits or options.results / "gpu_kernels.json"
    if not options.limits:
        subprocess.run([sys.executable, str(HERE / "kernels.py"), "--build", str(options.build), "--json", str(path)], check=False)
    if path.exists():
        limits = json.loads(path.read_text())["limits"]
    print(write(options, results, limits))


if __name__ == "__main__":
    main()
