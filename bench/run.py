"""Benchmarks Bonfire beside PyTorch in one run, interleaved, so that what else the machine does hits both alike.

    make bench                 # or: peers/bin/python bench/run.py --repeats 5 --steps 10
Writes bench/results/NAME.json (every measurement) and NAME.md (the table), with the machine, the versions and the commands.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parent
TOKENS_PER_STEP = 8 * 256  # of bench/small_llama.toml and of the peers


def machine():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next(line.split()[1] for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    system = next(line.split("=")[1].strip().strip('"') for line in open("/etc/os-release") if line.startswith("PRETTY_NAME"))
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(int(memory) / 2**20, 1), "system": f"{system}, {platform.machine()}",
            "compiler": subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout.splitlines()[0],
            "commit": subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True,
                                     text=True).stdout.strip()}


def measure(command):
    """The JSON object that a command prints last."""
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    text = ended.stdout[ended.stdout.index("{"):]
    return json.loads(text)


def speed(result):
    """Tokens a second of the median step: one measure for all, which a single disturbed step does not move."""
    return TOKENS_PER_STEP / (result["step_ms"] * 1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default="peers", help="folder of the peers' environment")
    parser.add_argument("--command", default="build/bonfire")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    torchrun = str(pathlib.Path(options.peers) / "bin" / "torchrun")
    steps = str(options.steps)

    def ours(ranks):
        return [options.command, "bench", "step", "bench/small_llama.toml", "--ranks", str(ranks), "--steps", steps, "--json"]

    def theirs(engine, ranks):
        return [torchrun, "--nproc-per-node", str(ranks), "bench/peers/train_ddp.py", "--engine", engine, "--steps", steps]

    runs = {"Bonfire, 2 ranks": ours(2), "PyTorch DDP, 2 ranks": theirs("ddp", 2), "PyTorch FSDP2, 2 ranks": theirs("fsdp2", 2),
            "Bonfire, 1 rank": ours(1), "Bare loop, 1 rank": [str(pathlib.Path(options.command).parent / "bench_bare_step"), "--steps", steps],
            "PyTorch, 1 rank": theirs("none", 1)}
    results = {name: [] for name in runs}
    for repeat in range(options.repeats):
        for name, command in runs.items():
            result = measure(command)
            results[name].append(result)
            print(f"{repeat + 1}/{options.repeats}  {name}: {speed(result):.0f} tokens/s", flush=True)

    def speeds(name):
        return [speed(result) for result in results[name]]

    lines = ["| | tokens/s of the median step: median | smallest | largest |", "|---|---|---|---|"]
    for name in runs:
        values = speeds(name)
        lines.append(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} | {max(values):.0f} |")
    ratio = statistics.median(speeds("Bonfire, 2 ranks")) / statistics.median(speeds("PyTorch DDP, 2 ranks"))
    overhead = statistics.median(r["step_ms"] for r in results["Bonfire, 1 rank"]) / statistics.median(
        r["step_ms"] for r in results["Bare loop, 1 rank"]) - 1
    lines += ["", f"Bonfire over DDP, 2 ranks, medians: {ratio:.2f}.",
              f"Step of `bonfire bench step` over a bare forward, backward and update of the same module, 1 rank: {overhead:+.1%}."]

    facts = machine()
    facts["when"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    page = ["# The 8.4M Llama-shaped model on CPU ranks", "",
            f"{options.repeats} interleaved repeats of {options.steps} steps each; fp32, AdamW, clipping at 1.0.", ""]
    page += lines + ["", *(f"- {key}: {value}" for key, value in facts.items()), "", "Commands:", "```sh"]
    page += [" ".join(command) for command in runs.values()] + ["```", ""]
    folder = BENCH / "results"
    folder.mkdir(exist_ok=True)
    (folder / "small_llama.json").write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")
    (folder / "small_llama.md").write_text("\n".join(page))
    print("\n".join(lines))

    overlap = [str(pathlib.Path(options.command).parent / "bench_overlap"), "--repeats", str(options.repeats)]
    text = subprocess.run(overlap, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page = ["# Overlap and speed-up, with blocks that sleep", "", text, *(f"- {key}: {value}" for key, value in facts.items()), "", "Command:",
            "```sh", " ".join(overlap), "```", ""]
    (folder / "overlap.md").write_text("\n".join(page))
    print(text)


if __name__ == "__main__":
    main()
