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
import tempfile
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

    def pipedream(self):
        """Stages that sleep: how near a full pipeline is to its slowest stage, and what it gains over one that is flushed."""
        partition = [self.options.command, "partition", "tests/plan/pipedream_profiles.json", "--model", "vgg16", "--cluster",
                     "16@3.125e9", "--json"]
        answer = subprocess.run(partition, cwd=ROOT, capture_output=True, text=True, check=True).stdout

        def case(replicas, mode, *words):
            ranks = sum(int(count) for count in replicas.split(","))
            return self.program("pipedream", "--ranks", str(ranks), "--replicas", replicas, "--mode", mode, *words)

        with tempfile.NamedTemporaryFile("w", suffix=".json") as costs:
            costs.write(answer)
            costs.flush()
            full = {f"{mode} | {replicas.replace(',', '-')}": case(replicas, mode)
                    for replicas in ("1,1,1,1", "3,1", "7,1") for mode in ("pipedream", "pipedream-vertical")}
            full["pipedream-2bw | 1-1-1-1"] = case("1,1,1,1", "pipedream-2bw", "--microbatches", "8", "--minibatches", "6")
            vgg = "pipedream | 15-1, VGG16 as published"
            full[vgg] = self.program("pipedream", "--ranks", "16", "--mode", "pipedream", "--costs", costs.name)
            gains = {f"{mode} | 1-1-1-1 | {m}": case("1,1,1,1", mode, "--against", "pipedream-flush", "--microbatches", str(m),
                                                     "--minibatches", "12" if m < 8 else "8")
                     for m in (4, 8) for mode in ("pipedream", "pipedream-2bw")}
            results = {name: [] for name in [*full, *gains]}
            for repeat in range(self.options.repeats):
                for name, command in (full | gains).items():
                    results[name].append(measure(command))
                    print(f"{repeat + 1}/{self.options.repeats}  {name}", flush=True)
        most_over = 0.03

        def median_of(name, of):
            return statistics.median(of(result) for result in results[name])

        lines = [f"Synthetic Units that sleep, a process for each rank; medians of {self.options.repeats} interleaved repeats. A minibatch: from one "
                 "update of the last stage to the next, in the full pipeline. The slowest stage is what its sleeping has really taken, divided "
                 "by its replicas. VGG16: the partition of its published profile on 16 ranks, whose shortest forward sleeps for 20 ms.", "",
                 "| schedule | replicas | minibatch, ms | slowest stage, ms | ratio | whole run, ms | simulated, ms | ratio |",
                 "|---|---|---|---|---|---|---|---|"]
        ratios, whole = [], []
        for name in full:
            ratios.append(median_of(name, lambda r: r["minibatch_ms"] / r["slowest_ms"]))
            whole.append(median_of(name, lambda r: r["whole_ms"] / r["simulated_ms"]))
            lines.append(f"| {name} | {median_of(name, lambda r: r['minibatch_ms']):.1f} | {median_of(name, lambda r: r['slowest_ms']):.1f} | "
                         f"{ratios[-1]:.4f} | {median_of(name, lambda r: r['whole_ms']):.0f} | "
                         f"{median_of(name, lambda r: r['simulated_ms']):.0f} | {whole[-1]:.4f} |")
        lines += ["", "How many times longer the same minibatches take with a flush after each of them (1F1B), p stages and m microbatches, from an "
                  "empty pipeline to an empty one:", "",
                  "| schedule | stages | m | gain | simulated | ratio |", "|---|---|---|---|---|---|"]
        off = []
        for name in gains:
            off.append(median_of(name, lambda r: r["gain"] / r["simulated_gain"]))
            lines.append(f"| {name} | {median_of(name, lambda r: r['gain']):.3f} | {median_of(name, lambda r: r['simulated_gain']):.3f} | {off[-1]:.4f} |")
        steady = max(ratios) <= 1 + most_over
        gain = all(abs(ratio - 1) <= most_over for ratio in off)
        lines += ["", f"The criteria: a minibatch of the full pipeline at most {most_over:.0%} over the slowest stage: {'met' if steady else 'missed'}. "
                  f"The gain within {most_over:.0%} of the simulated one: {'met' if gain else 'missed'}."]
        shown = [[word if word != costs.name else "partition.json" for word in command] for command in (full | gains).values()]
        self.write("pipedream", "PipeDream's speed, with synthetic layers", lines, [[*partition, ">", "partition.json"], *shown], results)

    def split_products(self):
        self.text("split_products", "Products of split layers beside their exchanges", "split_products")


def main():
    benches = ["small_llama", "sharded", "wrapping", "waiting", "overlap", "prefetch", "pipeline", "pipedream", "split_products"]
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
