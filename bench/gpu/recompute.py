"""Memory and speed of what makes a model fit on one GPU: recomputation, reversible blocks, offload, adapters, fp8, sharding.

    python3 bench/gpu/recompute.py [--build build] [--seconds 300] [--table 1.5B --table small --table largest]
Each row is one run of `bonfire bench step`. Rows are measured in order until --seconds are over; a row that would not end in
time is left out, and the page says so. Writes recompute_gpu.md and recompute_gpu.json to --results after every row; rows that
are not measured keep what the latter says of them. Predictions need no GPU: --predict prints them and measures nothing.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GIB = 2**30

FULL, ADAPTERS = ["layout.recompute=full"], ["adapter.rank=16", "adapter.alpha=32"]
HOST_INPUTS = [*FULL, "layout.recompute_offload=true"]


class Row:
    """seconds: about what the run takes, with building the model."""

    def __init__(self, name, settings=(), ranks=1, seconds=15, steps=4):
        self.name, self.settings, self.ranks, self.seconds, self.steps = name, list(settings), ranks, seconds, steps
        self.plan, self.report, self.error, self.commit = {}, None, "", ""

    def words(self):
        return [word for setting in [*self.settings, "checkpoint.every=0"] for word in ("--set", setting)]


class Table:
    def __init__(self, title, file, words, rows, settings=()):
        self.title, self.file, self.words, self.rows = title, file, words, rows
        for row in rows:
            row.settings = [*settings, *row.settings]


def sharded(what, ranks, *more):
    return Row(f"sharded = {what}, {ranks} ranks" + "".join(f", {word.split('=')[-1]}" for word in more),
               [f"layout.shard={ranks}", f"layout.sharded={what}", *more], ranks=ranks, seconds=20)


def tables():
    return {
        "1.5B": Table("A model of 1.5B parameters", "llama_1_5b",
                      "Batch 4, microbatch 4, sequences of 4096 tokens, bf16 with gradients in bf16.",
                      [Row("none"), Row("none, keeps norms and activations", ["train.keep_for_backward=all"]),
                       Row("selective", ["layout.recompute=selective"]), Row("full", FULL), Row("full, inputs on the host", HOST_INPUTS),
                       Row("full, every other block", [*FULL, "layout.recompute_every=2"])],
                      ["train.microbatch=4", "train.gradient_precision=bf16"]),
        "largest": Table("The largest models", "llama2_7b", "Batch 8, microbatch 2, sequences of 2048 tokens, bf16 with gradients in bf16.",
                         [Row("llama2-7b", seconds=45, steps=3), Row("recompute = full", FULL, seconds=45, steps=3),
                          Row("fp8, with weights in 8 bits", ["train.precision=fp8"], seconds=50, steps=3),
                          Row("adapters of rank 16", ADAPTERS, seconds=40, steps=3),
                          Row("full, 42 layers", [*FULL, "model.layers=42"], seconds=55, steps=3),
                          Row("full, offload = optimizer", [*FULL, "layout.offload=optimizer"], seconds=120, steps=2),
                          Row("llama2-13b, full, adapters", ["model.preset=llama2-13b", *FULL, *ADAPTERS], seconds=60, steps=2),
                          Row("llama2-70b with 38 layers, full, adapters",
                              ["model.preset=llama2-70b", "model.layers=38", "train.microbatch=1", *FULL, *ADAPTERS], seconds=240, steps=2)]),
        "small": Table("A model of less than 100M parameters", "llama_80m",
                       "Sequences of 1024 tokens, batch 32 (a rank has its part of it), bf16. Ranks of a row share the GPU and talk over "
                       "NCCL, which takes the host's loopback: their speed says nothing of ranks with a GPU each. Memory is that of one rank.",
                       [Row("none"), Row("selective", ["layout.recompute=selective"]), Row("full", FULL),
                        Row("reversible", ["model.reversible=true"]), Row("replicate = 2", ["layout.replicate=2"], 2, 20),
                        sharded("optimizer", 2), sharded("gradients", 2), sharded("parameters", 2),
                        sharded("parameters", 2, *FULL), sharded("parameters", 4),
                        Row("sharded = parameters, 2 ranks, reversible",
                            ["layout.shard=2", "layout.sharded=parameters", "model.reversible=true"], 2, 20)]),
    }


def predict(options, table, row):
    ended = subprocess.run([str(options.build / "bonfire"), "plan", str(HERE / f"{table.file}.toml"), "--memory", "--json", "--set",
                            "run.device=cuda", *row.words()], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(f"{table.title}, {row.name}: {ended.stderr.strip()}")
    row.plan = json.loads(ended.stdout)


def command_of(options, table, row):
    return [str(options.build / "bonfire"), "bench", "step", str((HERE / f"{table.file}.toml").relative_to(ROOT)), "--ranks", str(row.ranks),
            "--steps", str(row.steps), "--json", *row.words()]


def measure(options, table, row, seconds):
    command = command_of(options, table, row)
    row.report, row.error, row.commit = None, "", options.commit
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # with its ranks
        running.communicate()
        row.error = f"did not end in {seconds:.0f} s"
        return
    if running.returncode == 0:
        row.report = json.loads(out[out.index("{"):])
    else:
        row.error = (err.strip().splitlines() or ["no words"])[-1].replace("|", "/")


def gib(count):
    return f"{count / GIB:.2f}"


def cells(row, first):
    parameters = f"{row.plan['parameters'] / 1e9:.2f}B" if row.plan["parameters"] >= 1e9 else f"{row.plan['parameters'] / 1e6:.0f}M"
    host = row.plan["memory"].get("host", 0)
    known = [row.name, parameters, gib(row.plan["memory_bytes"]), gib(host) if host else ""]
    if not row.report:
        return [*known, row.error or "not measured", "", "", ""]
    report = row.report
    again = f"{report['step_ms'] / first['step_ms']:.3f}" if first else ""
    return [*known, gib(report["peak_memory_bytes"]), f"{report['tokens_per_second']:,.0f}", f"{report['step_ms']:.1f}", again]


def overlap(table):
    """How much of the copies of recomputed inputs hides behind the work."""
    rows = {row.name: row for row in table.rows}
    full, moved = rows.get("full"), rows.get("full, inputs on the host")
    if not (full and moved and full.report and moved.report):
        return []
    kept, more = moved.plan["memory"]["host"], moved.report["step_ms"] - full.report["step_ms"]
    return [f"With inputs on the host, {gib(kept)} GiB go there and come back in each step, which takes {more:+.1f} ms longer. Without any "
            f"overlap the two copies would take {2 * kept / 50e9 * 1e3:.0f} ms at 50 GB/s.", ""]


def said(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page(options, all_tables):
    commits = sorted({row.commit for table in all_tables.values() for row in table.rows if row.commit})
    lines = ["# What makes a model fit on one GPU", "",
             f"Memory and time of training steps with AdamW. {options.machine}; commit {', '.join(commits) or 'none'}. Step time is the median of 2 to "
             "4 steps after those that set a run up; \"of the first\" divides it by that of the table's first row. Memory in GiB: what `bonfire "
             "plan` predicts, what it predicts for the host, and the peak that was measured.", ""]
    for table in all_tables.values():
        lines += [f"## {table.title}", "", table.words, "",
                  "| | parameters | predicted | on the host | measured | tokens/s | step, ms | of the first |", "|---|---|---|---|---|---|---|---|"]
        lines += ["| " + " | ".join(cells(row, table.rows[0].report)) + " |" for row in table.rows] + [""] + overlap(table)
    lines += ["Commands:", "```sh", "python3 bench/gpu/recompute.py",
              *(" ".join(["build/bonfire", *command_of(options, table, row)[1:]]) for table in all_tables.values() for row in table.rows), "```", ""]
    return "\n".join(lines)


def write(options, all_tables):
    (options.results / "recompute_gpu.md").write_text(page(options, all_tables))
    (options.results / "recompute_gpu.json").write_text(json.dumps(
        {"machine": options.machine,
         "rows": {" ".join(command_of(options, table, row)[1:]): {"predicted": row.plan["memory"], "measured": row.report, "error": row.error,
                                                                 "commit": row.commit} for table in all_tables.values() for row in table.rows}},
        indent=1) + "\n")


def remember(options, all_tables):
    path = options.results / "recompute_gpu.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else {}
    for table in all_tables.values():
        for row in table.rows:
            before = known.get(" ".join(command_of(options, table, row)[1:]), {})
            row.report, row.error, row.commit = before.get("measured"), before.get("error", ""), before.get("commit", "")


def main():
    all_tables = tables()
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--results", type=pathlib.Path, default=HERE.parent / "results")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--table", choices=all_tables, action="append")
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    options.build = options.build.resolve()
    options.results.mkdir(exist_ok=True, parents=True)
    for table in all_tables.values():
        for row in table.rows:
            predict(options, table, row)
    if options.predict:
        options.machine = "not measured"
        print(page(options, all_tables))
        return
    options.machine = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    options.commit = git.stdout.strip() or "unknown"
    remember(options, all_tables)
    begin = time.monotonic()
    for name in options.table or all_tables:
        for row in all_tables[name].rows:
            started = time.monotonic()
            left = options.seconds - (started - begin)
            if left < row.seconds:
                continue
            measure(options, all_tables[name], row, left)
            what = row.error or gib(row.report["peak_memory_bytes"]) + " GiB"
            print(f"{name}, {row.name}: {what}; {time.monotonic() - started:.0f} s", flush=True)
            write(options, all_tables)
    print(page(options, all_tables))


if __name__ == "__main__":
    main()
