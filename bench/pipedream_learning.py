"""What PipeDream's modes learn: the demo model in each of them, on pipelines of 2 and 4 stages, against one rank.

    python3 bench/pipedream_learning.py [--command build/bonfire] [--steps 400] [--lr 3e-3 1e-3] [--folder DIR]
Writes bench/results/pipedream_learning.md and docs/pictures/pipedream_learning.svg. The picture is of
the last learning rate. No times are measured. With --folder the runs
are kept there, and those that are already there are not trained again.
"""
import argparse
import datetime
import json
import math
import pathlib
import subprocess
import sys
import tempfile

from run import ROOT, machine

MODES = ("pipedream", "pipedream-vertical", "pipedream-2bw", "pipedream-flush")
STAGES = (2, 4)
MOST_ABOVE = 0.02  # of the held-out loss, over that of one rank
COLORS = {"one rank": "#222", "pipedream": "#d62728", "pipedream-vertical": "#ff9d00", "pipedream-2bw": "#1f77b4",
          "pipedream-flush": "#2ca02c"}


def keys(options, lr, stages, mode):
    # A weight on two stages would be updated at different times; 2BW needs as many microbatches as there are stages.
    words = {"model.tied": "false", "train.microbatch": "4", "train.steps": options.steps, "train.eval_every": options.steps // 8,
             "train.eval_batches": 16, "train.log_every": options.steps, "checkpoint.every": 0, "run.folder": str(options.folder / lr),
             "optimizer.lr": lr, "optimizer.warmup": options.steps // 20}
    if mode:
        words |= {"layout.pipeline": stages, "layout.schedule": mode}
    return words


def trained(options, lr, stages, mode):
    """What a run reports, and its lines of metrics."""
    name = f"{mode}-{stages}" if mode else "one-rank"
    folder = options.folder / lr / name
    command = [options.command, "train", "examples/demo.toml", *(("--ranks", "1") if not mode else ()), "--json"]
    for key, value in (keys(options, lr, stages, mode) | {"run.name": name}).items():
        command += ["--set", f"{key}={value}"]
    if not (folder / "report.json").exists():
        print(lr, name, flush=True)
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    report = json.loads((folder / "report.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"stages": stages, "mode": mode, "report": report, "held": [(m["step"], m["eval_loss"]) for m in metrics if "eval_loss" in m],
            "losses": [(m["step"], m["loss"]) for m in metrics]}


def smoothed(points, over):
    """Means of so many losses each: those of single batches differ by more than the modes do."""
    means = []
    for begin in range(0, len(points) - over + 1, over):
        part = points[begin:begin + over]
        means.append((sum(step for step, _ in part) / over, sum(loss for _, loss in part) / over))
    return means


def panel(runs, left, title, floor, most_samples, batch):
    """One diagram: training losses as lines, held-out losses as dots, above the entropy of the data."""
    width, top, bottom = 400, 50, 330
    losses = [loss for run in runs for _, loss in smoothed(run["losses"], 10)[1:]]
    low, high = floor - 0.08, max(losses) + 0.05
    x = lambda samples: left + width * samples / most_samples
    y = lambda loss: bottom - (bottom - top) * (loss - low) / (high - low)
    out = [f'<text x="{left}" y="34">{title}</text>']
    for part in range(5):
        at = most_samples * part // 4
        out.append(f'<line x1="{x(at):.1f}" y1="{top}" x2="{x(at):.1f}" y2="{bottom}" stroke="#ddd"/>'
                   f'<text x="{x(at):.1f}" y="{bottom + 20}" text-anchor="middle">{at:,}</text>')
    for tenth in range(math.ceil(low * 2), math.floor(high * 2) + 1):
        out.append(f'<line x1="{left}" y1="{y(tenth / 2):.1f}" x2="{left + width}" y2="{y(tenth / 2):.1f}" stroke="#ddd"/>'
                   f'<text x="{left - 8}" y="{y(tenth / 2) + 4:.1f}" text-anchor="end">{tenth / 2:.1f}</text>')
    out.append(f'<line x1="{left}" y1="{y(floor):.1f}" x2="{left + width}" y2="{y(floor):.1f}" stroke="#888" stroke-dasharray="4 3"/>')
    for run in runs:
        color = COLORS[run["mode"] or "one rank"]
        # One rank is the widest line, so that one that hides it can be told.
        points = " ".join(f"{x(step * batch):.1f},{y(min(loss, high)):.1f}" for step, loss in smoothed(run["losses"], 10))
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{1.2 if run["mode"] else 4}" '
                   f'stroke-opacity="{1 if run["mode"] else .3}"/>')
        for step, loss in run["held"]:
            if loss < high:
                out.append(f'<circle cx="{x(step * batch):.1f}" cy="{y(loss):.1f}" r="{2.5 if run["mode"] else 4}" fill="{color}"/>')
    return out


def picture(runs, floor, steps, batch):
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 430" font-family="sans-serif" font-size="13">',
           '<rect width="960" height="430" fill="white"/>']
    for at, stages in enumerate(STAGES):
        shown = [run for run in runs if run["stages"] in (1, stages)]
        out += panel(shown, 55 + 475 * at, f"{stages} stages: loss by samples (line: training; dot: held out)", floor, steps * batch, batch)
    left = 55
    for name, color in COLORS.items():
        out.append(f'<line x1="{left}" y1="382" x2="{left + 26}" y2="382" stroke="{color}" '
                   f'stroke-width="{4 if name == "one rank" else 2}" stroke-opacity="{.3 if name == "one rank" else 1}"/>'
                   f'<text x="{left + 32}" y="386">{name}</text>')
        left += 170
    out += ['<text x="55" y="412" fill="#555">dashed: the entropy of the data, which no model can go below</text>', "</svg>", ""]
    return "\n".join(out)


def table(runs, floor):
    one = runs[0]["report"]["eval_loss"]
    lines = ["| schedule | stages | staleness by stage | held-out loss | over one rank's | over the entropy | last training losses |",
             "|---|---|---|---|---|---|---|"]
    for run in runs:
        report = run["report"]
        stale = ", ".join(str(updates) for updates in report.get("staleness", [0]))
        last = [loss for _, loss in run["losses"]][-20:]
        lines.append(f"| {run['mode'] or 'one rank'} | {run['stages']} | {stale} | {report['eval_loss']:.4f} | "
                     f"{100 * (report['eval_loss'] / one - 1):+.2f} % | {100 * (report['eval_loss'] / floor - 1):+.1f} % | "
                     f"{sum(last) / len(last):.4f} |")
    over = {f"{run['mode']} on {run['stages']} stages": run["report"]["eval_loss"] / one - 1 for run in runs[1:]}
    missed = [f"{name} ({100 * more:+.1f} %)" for name, more in over.items() if more > MOST_ABOVE]
    return lines + ["", f"A held-out loss at most {100 * MOST_ABOVE:.0f}% over that of one rank after the same number of samples: "
                        + (f"missed by {', '.join(missed)}." if missed else f"met ({100 * max(over.values()):+.2f} % at most).")]


def page(options, results, floor, batch):
    lines = ["# What PipeDream's modes learn", "",
             f"examples/demo.toml with `model.tied = false` and microbatches of 4 samples: {options.steps} steps of {batch} samples. The data is a",
             f"random Markov chain with an entropy of {floor:.4f}."]
    for lr, runs in results.items():
        lines += ["", f"## Learning rate {lr}", *table(runs, floor)]
    lines += ["", f"Loss by samples, with the learning rate {list(results)[-1]}:", "",
              "![Training and held-out loss by samples](../../docs/pictures/pipedream_learning.svg)", ""]
    lines += [f"- {key}: {value}" for key, value in machine().items()]
    lines += [f"- when: {datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='minutes')}", "", "Command:", "```sh",
              f"python3 bench/pipedream_learning.py --steps {options.steps} --lr {' '.join(results)}", "```", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build" / "bonfire"))
    parser.add_argument("--steps", type=int, default=400, help="a multiple of 8")
    parser.add_argument("--lr", nargs="+", default=["3e-3", "1e-3"])
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = (options.folder or pathlib.Path(scratch)).resolve()
        results = {lr: [trained(options, lr, 1, None)] + [trained(options, lr, stages, mode) for stages in STAGES for mode in MODES]
                   for lr in options.lr}
    runs = list(results.values())[-1]
    floor, batch = runs[0]["report"]["entropy_floor"], 16
    (ROOT / "docs" / "pictures" / "pipedream_learning.svg").write_text(picture(runs, floor, options.steps, batch))
    text = page(options, results, floor, batch)
    (ROOT / "bench" / "results" / "pipedream_learning.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
