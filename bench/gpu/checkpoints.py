"""What an asynchronous save costs the training of a 162M model on one GPU: the steps beside five saves, each against as many
steps just before it.

    python3 bench/gpu/checkpoints.py [--command build/bonfire] [--folder DIR] [--steps 40] [--repeats 5]
Needs 4 GB on the disk of FOLDER. Prints a table in Markdown, and with --output writes it there.
"""
import argparse
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from checkpoints import beside_saves, rows_of_saves  # noqa: E402
from run import ROOT  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=str(ROOT / "build/bonfire"))
    parser.add_argument("--folder", default=str(ROOT))
    parser.add_argument("--steps", type=int, default=40, help="between two saves")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="build-checkpoints-") as scratch:
        saves = beside_saves(options, pathlib.Path(scratch), "bench/gpu/llama_162m.toml", ranks=1, every=options.steps,
                             settings=["train.keep_for_backward=all", "train.log_every=1000"])
    text = "\n".join([f"The 162M model of bench/gpu/llama_162m.toml, {len(saves)} asynchronous saves.", "",
                      *rows_of_saves({"162M": saves}), ""])
    print(text)
    if options.output:
        pathlib.Path(options.output).write_text(text)


if __name__ == "__main__":
    main()
