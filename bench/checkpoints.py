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


def asynchronous(options, scratch):
    """Of each save: seconds of the steps beside it, those of as many steps before it, and the longest of the former."""
    every = 24
    subprocess.run([options.command, "train", str(ROOT / "bench/small_llama.toml"), "--ranks", str(RANKS), "--set",
                    f"train.steps={every * (options.repeats + 1) + every // 2}", "--set", f"checkpoint.every={every}", "--set",
                    "run.threads=1", "--set", f"run.folder={scratch}", "--set", "checkpoint.keep=1"],
                   check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=open(scratch / "said.txt", "w"))
    folder = scratch / "small_llama"
    tokens = 8 * 256
    steps = {line["step"]: tokens / line["tokens_per_second"]
             for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    units = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
    found = []
    for step, length, unit in re.findall(r"step (\d+): saved in .* in ([\d.]+) (\w+)\)", (scratch / "said.txt").read_text()):
        step, took = int(step), float(length) * units[unit]
        if step < 2 * every or step + every // 2 not in steps:
            continue
        count, beside = 0, 0.0
        while beside < took:  # until the save has ended
            count += 1
            beside += steps[step + count]
        before = sum(steps[step - at] for at in range(count))
        found.append({"save": took, "steps": count, "beside": beside, "before": before,
                      "longest": max(steps[step + at] for at in range(1, count + 1)) * count / before})
    return found


def page(options, facts, seconds, saves):
    mib = options.bytes / 2**20

    def row(name, against):
        part = [100 * one / other for one, other in zip(seconds[against], seconds[name])]
        return (f"| {name} | {median(seconds[name])} | {mib / statistics.median(seconds[name]):,.0f} | "
                f"{median(part, digits=0)} % |")

    costs = [100 * (one["beside"] / one["before"] - 1) for one in saves]

    def verdict(met):
        return "met" if met else "missed"

    def bandwidth(name, against):
        return statistics.median(other / one for one, other in zip(seconds[name], seconds[against]))

    quick = min(bandwidth("save", "dd, written"), bandwidth("load", "dd, read")) >= least_bandwidth
    cheap = statistics.median(costs) <= 100 * most_cost
    return "\n".join([
        "# Checkpoints: saving, loading, and training beside a save", "",
        f"{mib:,.0f} MiB of state on {RANKS} ranks, checksums included, interleaved with `dd` of as many random bytes on the same",
        f"disk (`conv=fsync`; the page cache dropped before each). Median of {options.repeats} [minimum, maximum].", "",
        "| | seconds | MiB/s | of dd's bandwidth |", "|---|---|---|---|",
        f"| dd, written | {median(seconds['dd, written'])} | {mib / statistics.median(seconds['dd, written']):,.0f} | |",
        row("save", "dd, written"),
        f"| dd, read | {median(seconds['dd, read'])} | {mib / statistics.median(seconds['dd, read']):,.0f} | |",
        row("load", "dd, read"), "",
        f"Training beside a save: bench/small_llama.toml on {RANKS} ranks of one thread each, {len(saves)} asynchronous saves. The",
        "steps from a save's beginning to its end, the copy to host memory included, against as many steps just before it.", "",
        "| | median [minimum, maximum] |", "|---|---|",
        f"| a save, from its beginning to its end | {median([one['save'] for one in saves])} s |",
        f"| steps beside it | {median([one['steps'] for one in saves], digits=0)} |",
        f"| what they take longer | {median(costs, digits=1)} % |",
        f"| the longest of them, against the mean step before | {median([one['longest'] for one in saves])} |", "",
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
        saves = asynchronous(options, pathlib.Path(scratch))
    pathlib.Path(options.output).write_text(page(options, facts, seconds, saves))


if __name__ == "__main__":
    main()
