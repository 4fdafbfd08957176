"""Benchmarks Bonfire and PyTorch in one run, interleaved, so that other load on the machine affects both.

    make bench                 # or: peers/bin/python bench/run.py --repeats 5 --steps 10 [--only sharded]
Writes bench/results/NAME.md (the table) and, for benchmarks with real models, NAME.json (every measurement), with the machine, the
versions and the commands.
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
import textwrap

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


class Spinning:
    """As many processes as there are cores, which do nothing and never sleep, for the length of a `with`."""

    def __enter__(self):
        self.processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def interleaved(runs, repeats):
    """Every command in turn, again and again."""
    results = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, command in runs.items():
            result = measure(command)
            results[name].append(result)
            print(f"{repeat + 1}/{repeats}  {name}: {result['step_ms']:.1f} ms a step", flush=True)
    return results


def speed(result):
    """Tokens a second of the median step: one measure for all, which a single disturbed step does not move."""
    return TOKENS_PER_STEP / (result["step_ms"] * 1e-3)


def spread(values, scale=1.0):
    return f"{statistics.median(values) * scale:.0f} | {min(values) * scale:.0f} | {max(values) * scale:.0f}"


class Bench:
    def __init__(self, options):
        self.options = options
        self.build = pathlib.Path(options.command).parent
        self.facts = machine()
        self.facts["when"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")

    def ours(self, ranks, *settings):
        words = [word for setting in settings for word in ("--set", setting)]
        return [self.options.command, "bench", "step", "bench/small_llama.toml", "--ranks", str(ranks), "--steps",
                str(self.options.steps), *words, "--json"]

    def theirs(self, engine, ranks):
        torchrun = str(pathlib.Path(self.options.peers) / "bin" / "torchrun")
        return [torchrun, "--nproc-per-node", str(ranks), "bench/peers/train_ddp.py", "--engine", engine, "--steps",
                str(self.options.steps)]

    def program(self, name, *words):
        return [str(self.build / f"bench_{name}"), *words]

    def write(self, name, title, lines, commands, results=None):
        # Prose is wrapped; tables cannot be.
        lines = [part for line in lines
                 for part in ([line] if line.startswith("|") or len(line) <= 132 else textwrap.wrap(line, 132, break_on_hyphens=False))]
        page = [f"# {title}", "", *lines, "", *(f"- {key}: {value}" for key, value in self.facts.items()), "",
                "Commands:" if len(commands) > 1 else "Command:", "```sh", *(" ".join(command) for command in commands), "```", ""]
        folder = BENCH / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.md").write_text("\n".join(page))
        if results:
            (folder / f"{name}.json").write_text(json.dumps({"machine": self.facts, "results": results}, indent=1) + "\n")
        print("\n".join(lines), flush=True)

    def said(self, title):
        return f"{self.options.repeats} interleaved repeats of {self.options.steps} steps each; {title}."

    def small_llama(self):
        runs = {"Bonfire, 2 ranks": self.ours(2), "PyTorch DDP, 2 ranks": self.theirs("ddp", 2),
                "PyTorch FSDP2, 2 ranks": self.theirs("fsdp2", 2), "Bonfire, 1 rank": self.ours(1),
                "Bare loop, 1 rank": self.program("bare_step", "--steps", str(self.options.steps)),
                "PyTorch, 1 rank": self.theirs("none", 1)}
        results = interleaved(runs, self.options.repeats)
        speeds = {name: [speed(result) for result in results[name]] for name in runs}
        ratio = statistics.median(speeds["Bonfire, 2 ranks"]) / statistics.median(speeds["PyTorch DDP, 2 ranks"])
        overhead = statistics.median(r["step_ms"] for r in results["Bonfire, 1 rank"]) / statistics.median(
            r["step_ms"] for r in results["Bare loop, 1 rank"]) - 1
        lines = [self.said("fp32, AdamW, clipping at 1.0"), "",
                 "| | tokens/s of the median step: median | smallest | largest |", "|---|---|---|---|",
                 *(f"| {name} | {spread(speeds[name])} |" for name in runs), "",
                 f"Bonfire relative to DDP, 2 ranks, medians: {ratio:.2f}.",
                 f"Step time of `bonfire bench step` relative to a bare forward, backward and update of the same module, 1 rank: {overhead:+.1%}."]
        self.write("small_llama", "The 8.4M Llama-shaped model on CPU ranks", lines, list(runs.values()), results)

    def sharded(self):
        """ZeRO-3 beside FSDP2. The command for its speed; the library's program, which looks at its own process, for memory."""
        command, program, peer = "Bonfire command", "Bonfire library (a C++ program)", "PyTorch FSDP2"
        runs = {command: self.ours(2, "layout.shard=2", 'layout.sharded="parameters"'), peer: self.theirs("fsdp2", 2),
                program: [self.options.command, "launch", "-n", "2", "--",
                          *self.program("sharded_step", "--steps", str(self.options.steps))]}
        results = interleaved(runs, self.options.repeats)

        def values(name, key):
            return [result[key] for result in results[name] if key in result]

        lines = [self.said("2 ranks, fully sharded, parameters freed after forward; fp32, AdamW, clipping at 1.0"), "",
                 "| | tokens/s of the median step: median | smallest | largest |", "|---|---|---|---|",
                 *(f"| {name} | {spread([speed(result) for result in results[name]])} |" for name in runs), "",
                 "Memory of the rank with the most. Process memory is the peak (VmHWM) minus the memory in use (VmRSS) before the model was "
                 "built, read by both programs from their own process.", "",
                 "| | process, MB: median | smallest | largest | tensors, MB | CPU time per step, both ranks, ms |",
                 "|---|---|---|---|---|---|"]
        for name in (program, peer):
            tensors = values(name, "peak_memory_bytes")
            lines.append(f"| {name} | {spread(values(name, 'process_memory_bytes'), 1e-6)} | "
                         f"{f'{statistics.median(tensors) * 1e-6:.0f}' if tensors else ''} | "
                         f"{statistics.median(values(name, 'processor_ms')):.0f} |")

        def over(name, key):
            return statistics.median(values(name, key)) / statistics.median(values(peer, key))

        lines += ["", f"Bonfire relative to FSDP2, medians: {1 / over(command, 'step_ms'):.2f} times the tokens/s (command), "
                  f"{1 / over(program, 'step_ms'):.2f} times (library); {over(program, 'process_memory_bytes'):.2f} times the memory."]
        self.write("sharded", "ZeRO-3 on two CPU ranks: the 8.4M Llama-shaped model", lines, list(runs.values()), results)

    def wrapping(self):
        """One model whose Units differ in size, wrapped in different ways."""
        ways = {"every Unit": "all", "by type: the convolutions": "types:Convolution", "at least 100,000 parameters": "100000", "at least 1,000,000 parameters": "1000000",
                "a predicate: every second Unit": "predicate", "all in one": "one"}
        runs = {name: [self.options.command, "launch", "-n", "2", "--",
                       *self.program("sharded_step", "--model", "vgg", "--wrap", way, "--steps", str(self.options.steps))]
                for name, way in ways.items()}
        results = interleaved(runs, self.options.repeats)
        lines = [self.said("VGG16 for 32 x 32 images (16.3 million parameters in 16 Units of 1,792 to 2,359,808), 2 ranks, sharded parameters, "
                           "fp32, AdamW, clipping"), "",
                 "| wrapping | groups | collectives per step | moved by a rank, MB | gathered parameters and unsharded gradients, MB | peak of all tensors, MB | "
                 "step, ms: median | smallest | largest |", "|---|---|---|---|---|---|---|---|---|"]
        for name in runs:
            one = results[name][0]
            lines.append(f"| {name} | {one['groups']} | {one['collectives']} | {one['moved_bytes'] * 1e-6:.1f} | "
                         f"{one['pool_bytes'] * 1e-6:.1f} | {one['peak_memory_bytes'] * 1e-6:.1f} | "
                         f"{spread([result['step_ms'] for result in results[name]])} |")
        self.write("wrapping", "Wrapping policies", lines, list(runs.values()), results)

    def waiting(self):
        """What OpenMP's threads do while they wait, on a machine that is idle and on one that is not."""
        tiny = [f"model.{key}={value}" for key, value in {"dim": 64, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 256, "vocab": 256}.items()]
        models = {"8.4M Llama-shaped model": [], "tiny model (dim 64, 2 layers, 4 samples of 32 tokens)": [*tiny, "data.sequence=32", "train.batch=4"]}
        # 300,000 looks before a thread sleeps is what libgomp does where nobody tells it.
        policies = {"spinning, OpenMP's default": ["env", "GOMP_SPINCOUNT=300000"], "passive": ["env", "OMP_WAIT_POLICY=passive"],
                    "spinning briefly, as Bonfire's ranks do": []}
        runs = {f"{model}, {ranks} rank{'s' if ranks > 1 else ''} | {policy}": prefix + self.ours(ranks, *settings)
                for model, settings in models.items() for ranks in (1, 2) for policy, prefix in policies.items()}
        idle = interleaved(runs, self.options.repeats)
        with Spinning():
            busy = interleaved(runs, self.options.repeats)

        def steps(results, name):
            return [result["step_ms"] for result in results[name]]

        lines = [self.said(f"one rank has {os.cpu_count()} threads, two have half of them each; busy: with {os.cpu_count()} other processes "
                           "that spin, one per core"), "",
                 "| | waiting threads | idle, ms per step: median | smallest | largest | busy: median | smallest | largest | busy over idle |",
                 "|---|---|---|---|---|---|---|---|---|"]
        ratios, most_over_idle = {}, 3
        for name in runs:
            one, other = ([f"{value:.2f}" for value in (statistics.median(steps(results, name)), min(steps(results, name)),
                                                        max(steps(results, name)))] for results in (idle, busy))
            ratio = statistics.median(steps(busy, name)) / statistics.median(steps(idle, name))
            lines.append(f"| {name} | {' | '.join(one)} | {' | '.join(other)} | {ratio:.1f} |")
            ratios[name] = ratio
        ours = {name: ratio for name, ratio in ratios.items() if "as Bonfire's ranks do" in name}
        missed = [f"{name.split(' |')[0]}: {ratio:.1f} times" for name, ratio in ours.items() if ratio > most_over_idle]
        lines += ["", f"The criterion: with as many spinning processes as cores, a step as Bonfire's ranks wait takes at most {most_over_idle} times the",
                  f"idle one. {'Missed by ' + '; '.join(missed) if missed else 'Met by all'}."]
        self.write("waiting", "Waiting threads on an idle and on a busy machine", lines, list(runs.values()),
                   {"idle": idle, "busy": busy})

    def text(self, name, title, program):
        command = self.program(program, "--repeats", str(self.options.repeats))
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        self.write(name, title, said.splitlines(), [command])

    def overlap(self):
        self.text("overlap", "Overlap and speed-up, with synthetic layers", "overlap")

    def prefetch(self):
        self.text("prefetch", "Prefetching all-gathers, with synthetic layers", "prefetch")

    def pipeline(self):
        self.text("pipeline", "Measured and simulated pipeline bubbles, with synthetic layers", "pipeline")

    def split_products(self):
        self.text("split_products", "Products of split layers beside their exchanges", "split_products")


def main():
    benches = ["small_llama", "sharded", "wrapping", "waiting", "overlap", "prefetch", "pipeline", "split_products"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", default="peers", help="folder of the peers' environment")
    parser.add_argument("--command", default="build/bonfire")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=benches, default=benches)
    options = parser.parse_args()
    bench = Bench(options)
    for name in options.only:
        getattr(bench, name)()


if __name__ == "__main__":
    main()
