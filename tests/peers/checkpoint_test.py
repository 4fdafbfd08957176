"""A checkpoint of Bonfire, read by a stranger: examples/read_checkpoint.py, with the safetensors package alone."""
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from probe import BUILD, run

SOURCE = pathlib.Path(__file__).resolve().parents[2]
READER = SOURCE / "examples" / "read_checkpoint.py"
COMMAND = BUILD / "bonfire"

TINY = """
[run]
name = "tiny"
device = "cpu"
[model]
type = "gpt2"
dim = 16
layers = 2
heads = 2
vocab = 64
[data]
sequence = 8
[train]
steps = 3
batch = 12
"""

spec = importlib.util.spec_from_file_location("read_checkpoint", READER)
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)


def read_with_script(*words):
    return subprocess.run([sys.executable, READER, *map(str, words)], capture_output=True, text=True)


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def all_of(folder):
    return {(tensor["name"], tensor["kind"]): reader.read(folder, tensor) for tensor in manifest_of(folder)["tensors"]}


class Checkpoint(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)
        (self.scratch / "tiny.toml").write_text(TINY)

    def train(self, name, ranks, *more):
        run([COMMAND, "train", self.scratch / "tiny.toml", "--ranks", ranks, "--set", f"run.name={name}",
             "--set", f"run.folder={self.scratch / 'runs'}", *more])
        return self.scratch / "runs" / name / "checkpoints" / "step-00000003"

    def test_the_script_is_short(self):
        self.assertLessEqual(len(READER.read_text().splitlines()), 40)

    def test_every_layout_is_read_as_the_whole_file_of_one_part(self):
        for name, more in {"one": (), "sharded": ("layout.shard=2",), "stages": ("layout.pipeline=2", "train.microbatch=6"),
                           "halves": ("train.precision=bf16", "layout.shard=2")}.items():
            folder = self.train(name, 1 if name == "one" else 2, *(word for key in more for word in ("--set", key)))
            whole = self.scratch / f"{name}-whole"
            run([COMMAND, "checkpoint", "reshard", folder, whole])
            pieces = {(tensor["name"], tensor["kind"]): tensor["pieces"] for tensor in manifest_of(whole)["tensors"]}
            tensors = all_of(folder)
            self.assertEqual(tensors.keys(), pieces.keys())
            for key, values in tensors.items():
                with safe_open(whole / pieces[key][0]["file"], framework="pt") as file:
                    self.assertTrue(torch.equal(values, file.get_tensor(pieces[key][0]["tensor"])), key)

    def test_boxes_and_bfloat16(self):
        values = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
        save_file({"left": values[:, :2].reshape(-1).contiguous(), "right": values[:, 2:].reshape(-1)[:7].contiguous(),
                   "rest": values[:, 2:].reshape(-1)[7:].contiguous()}, self.scratch / "rank-00000.safetensors")

        def piece(name, columns, first, count):
            return {"file": "rank-00000.safetensors", "tensor": name, "box_begin": [0, columns[0]], "box_end": [4, columns[1]],
                    "first": first, "count": count}

        tensor = {"shape": [4, 6], "dtype": "BF16",
                  "pieces": [piece("left", (0, 2), 0, 8), piece("right", (2, 6), 0, 7), piece("rest", (2, 6), 7, 9)]}
        self.assertTrue(torch.equal(reader.read(self.scratch, tensor), values))

    def test_the_command_line(self):
        folder = self.train("listed", 2)
        listed = read_with_script(folder)
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertEqual(len(listed.stdout.splitlines()), len(manifest_of(folder)["tensors"]))
        name = next(tensor["name"] for tensor in manifest_of(folder)["tensors"] if tensor["kind"] == "exp_avg")
        for words in ((name,), (name, "exp_avg")):
            one = read_with_script(folder, *words)
            self.assertEqual(one.returncode, 0, one.stderr)
            self.assertTrue(one.stdout.startswith("tensor("), one.stdout)
        unknown = read_with_script(folder, "nothing")
        self.assertEqual(unknown.returncode, 1)
        self.assertTrue(re.search(r"no tensor nothing \(value\)", unknown.stderr), unknown.stderr)


if __name__ == "__main__":
    unittest.main()
