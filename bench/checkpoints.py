"""Saving and loading, beside what the same disk does for dd; and what an asynchronous save costs the training beside it.

    python3 bench/checkpoints.py [--command build/bonfire] [--folder DIR] [--bytes 2147483648] [--repeats 5]
as root, who may drop the page cache. Writes bench/results/checkpoints.md. Needs twice the bytes on the disk of FOLDER, and as
much memory for random numbers, which no disk can shorten.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from run import ROOT, machine, measure

RANKS = 2
# Steps from one save to the next, and settings.
RUNS = {"batch 8": (24, []), "batch 64": (8, ["train.batch=64", "train.microbatch=4"])}
least_bandwidth, most_cost = 0.8, 0.02


def timed(*command):
    begin = time.monotonic()
    subprocess.run([str(word) for word in command], check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - begin


def drop_caches():
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")


def median(values, scale=1.0, digits=2):
    return f"{statistics.median(values) * scale:.{digits}f} [{min(values) * scale:.{digits}f}, {max(values) * scale:.{digits}f}]"


def disk(options, scratch):
    """Seconds by name, interleaved."""
    program = pathlib.Path(options.command).resolve().parent / "bench_checkpoint"
    plain, checkpoints = scratch / "plain", scratch / "checkpoints"
    source = pathlib.Path(tempfile.mkstemp(dir="/dev/shm")[1])
    blocks = max(1, options.bytes >> 22)

    def ours(mode):
        return measure([options.command, "launch", "-n", str(RANKS), "--", str(program), "--folder", str(checkpoints),
                        "--mode", mode, "--bytes", str(options.bytes)])["seconds"]

    seconds = {name: [] for name in ("dd, written", "save", "dd, read", "load")}
    try:
        with open(source, "wb") as file:
            for _ in range(blocks):
                file.write(os.urandom(1 << 22))
        for repeat in range(options.repeats):
            for name, action in {
                "dd, written": lambda: timed("dd", f"if={source}", f"of={plain}", "bs=4M", "conv=fsync"),
                "save": lambda: ours("save"),
                "dd, read": lambda: timed("dd", f"if={plain}", "of=/dev/null", "bs=4M"),
                "load": lambda: ours("load"),
            }.items():
                drop_caches()
                seconds[name].append(action() * (options.bytes / (blocks << 22) if name.startswith("dd") else 1))
                print(f"{repeat + 1}/{options.repeats}  {name}: {seconds[name][-1]:.2f} s", flush=True)
            plain.unlink()
            shutil.rmtree(checkpoints)
    finally:
        source.unlink()
    return seconds


def beside_saves(options, scratch, file, ranks, every, settings):
    """Of each asynchronous save of a run: how long it took, the steps beside it, the steps just before it that took as long, and
    the longest of the former. The first save of a run, which also makes its memory, does not count."""
    name = f"run-{len(list(scratch.iterdir()))}"
    said = scratch / f"{name}.txt"
    words = [f"run.name={name}", f"run.folder={scratch}", f"train.steps={every * (options.repeats + 1) + every // 2}",
             f"checkpoint.every={every}", "checkpoint.keep=1", *settings]
    subprocess.run([options.command, "train", str(ROOT / file), "--ranks", str(ranks),
                    *(word for setting in words for word in ("--set", setting))],
                   check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=open(said, "w"))
    config = (scratch / name / "config.toml").read_text()
    tokens = int(re.search(r"^batch = (\d+)", config, re.M)[1]) * int(re.search(r"^sequence = (\d+)", config, re.M)[1])
    steps = {line["step"]: tokens / line["tokens_per_second"]
             for line in map(json.loads, (scratch / name / "metrics.jsonl").read_text().splitlines())}
    units = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
    found = []
    for step, length, unit in re.findall(r"step (\d+): saved in .* in ([\d.]+) (\w+)\)", said.read_text()):
        step, took = int(step), float(length) * units[unit]
        if step < 2 * every or step + every // 2 not in steps:
            continue
        count, beside = 0, 0.0
        while beside < took:  # until the save has ended
            count += 1
            if step + count not in steps or count >= every:
                sys.exit(f"{file}: a save takes {took:.1f} s, longer than the {every} steps to the next one")
            beside += steps[step + count]
        before = sum(steps[step - at] for at in range(count))
        found.append({"save": took, "steps": count, "beside": beside, "before": before,
                      "longest": max(steps[step + at] for at in range(1, count + 1)) * count / before})
    return found


def costs_of(saves):
    """Percent."""
    return [100 * (one["beside"] / one["before"] - 1) for one in saves]


def rows_of_saves(runs):
    """A table with a column for each run."""
    def row(what, value):
        return f"| {what} | " + " | ".join(value(saves) for saves in runs.values()) + " |"

    return [f"| median [minimum, maximum] | {' | '.join(runs)} |", "|---|" + "---|" * len(runs),
            row("a save, from its beginning to its end, s", lambda saves: median([one["save"] for one in saves])),
            row("steps beside it", lambda saves: median([one["steps"] for one in saves], digits=0)),
            row("what they take longer, %", lambda saves: median(costs_of(saves), digits=1)),
            row("the longest of them, against the mean step before", lambda saves: median([one["longest"] for one in saves]))]


def page(options, facts, seconds, saves):
    mib = options.bytes / 2**20

    def row(name, against):
        part = [100 * one / other for one, other in zip(seconds[against], seconds[name])]
        return (f"| {name} | {median(seconds[name])} | {mib / statistics.median(seconds[name]):,.0f} | "
                f"{median(part, digits=0)} % |")

    def verdict(met):
        return "met" if met else "missed"

    def bandwidth(name, against):
        return statistics.median(other / one for one, other in zip(seconds[name], seconds[against]))

    quick = min(bandwidth("save", "dd, written"), bandwidth("load", "dd, read")) >= least_bandwidth
    cheap = max(statistics.median(costs_of(one)) for one in saves.values()) <= 100 * most_cost
    return "\n".join([
        "# Checkpoints: saving, loading, and training beside a save", "",
        f"{mib:,.0f} MiB of state on {RANKS} ranks, checksums included, interleaved with `dd` of as many random bytes on the same",
        f"disk (`conv=fsync`; the page cache dropped before each). Median of {options.repeats} [minimum, maximum].", "",
        "| | seconds | MiB/s | of dd's bandwidth |", "|---|---|---|---|",
        f"| dd, written | {median(seconds['dd, written'])} | {mib / statistics.median(seconds['dd, written']):,.0f} | |",
        row("save", "dd, written"),
        f"| dd, read | {median(seconds['dd, read'])} | {mib / statistics.median(seconds['dd, read']):,.0f} | |",
        row("load", "dd, read"), "",
        f"Training beside a save: bench/small_llama.toml on {RANKS} ranks of one thread each, {options.repeats} asynchronous saves. The",
        "steps from a save's beginning to its end, checksums and the copy to host memory included, against as many steps just before it.",
        "", *rows_of_saves(saves), "",
        f"The criteria: saving and loading at {least_bandwidth:.0%} or more of dd's bandwidth: {verdict(quick)}. An asynchronous save costs at",
        f"most {most_cost:.0%} of the steps beside it: {verdict(cheap)}.", "",
        *(f"- {name}: {value}" for name, value in facts.items()), "",
        "Command:", "```sh",
        f"python3 bench/checkpoints.py --bytes {options.bytes} --repeats {options.repeats}", "```", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build/bonfire"))
    parser.add_argument("--folder", default=str(ROOT), help="on the disk that is measured")
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", default=str(ROOT / "bench/results/checkpoints.md"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/checkpoints.py: run it as root, who may drop the page cache")
    facts = machine()
    facts["when"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="build-checkpoints-") as scratch:
        seconds = disk(options, pathlib.Path(scratch))
        saves = {name: beside_saves(options, pathlib.Path(scratch), "bench/small_llama.toml", RANKS, every,
                                    ["run.threads=1", *settings])
                 for name, (every, settings) in RUNS.items()}
    pathlib.Path(options.output).write_text(page(options, facts, seconds, saves))


if __name__ == "__main__":
    main()
