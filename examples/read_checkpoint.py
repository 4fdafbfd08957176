"""Reads a checkpoint of Bonfire with the safetensors package: lists its tensors, or prints one.

python3 read_checkpoint.py CHECKPOINT [NAME [KIND]]
"""
import json
import pathlib
import sys

import torch
from safetensors import safe_open


def read(folder, tensor):
    """The whole tensor, put together from its pieces."""
    whole = torch.empty(tensor["shape"]) if not tensor["pieces"] else None
    for piece in tensor["pieces"]:
        with safe_open(folder / piece["file"], framework="pt") as file:
            values = file.get_tensor(piece["tensor"]).reshape(-1)
        whole = torch.empty(tensor["shape"], dtype=values.dtype) if whole is None else whole
        box = whole[tuple(slice(*ends) for ends in zip(piece.get("box_begin", []), piece.get("box_end", [])))]
        elements = box.reshape(-1).clone()
        elements[piece["first"] : piece["first"] + piece["count"]] = values
        box.copy_(elements.view(box.shape))
    return whole


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["format"] != "bonfire checkpoint" or manifest["version"] not in (1, 2):
        sys.exit(f"{folder}: not a checkpoint of version 1 or 2")
    name, kind = (sys.argv[2:] + ["value"])[:2] if len(sys.argv) > 2 else (None, None)
    for tensor in manifest["tensors"]:
        if name is None:
            print(f'{tensor["kind"]:<12} {tensor["dtype"]:<7} {tensor["shape"]!s:<20} {tensor["name"]}')
        elif (tensor["name"], tensor["kind"]) == (name, kind):
            sys.exit(print(read(folder, tensor)))
    if name is not None:
        sys.exit(f"{folder}: no tensor {name} ({kind}); without a name, all are listed")
