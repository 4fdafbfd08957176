"""One rank of PyTorch's side of fsdp2_test.py: the model in FOLDER, fully sharded by FSDP2, on the tokens in FOLDER.

    torchrun --nproc-per-node 2 fsdp2_train.py NAME FOLDER '{"shard": 2, "replicate": 1, ...}'
Rank 0 writes FOLDER/theirs.json: losses and gradient norms, step by step.
"""
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from published import Written, blocks


def main():
    name, folder, how = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    written = Written(folder)
    model = written.build(name, torch.float32).train()
    frozen = {item["name"] for item in written.index["parameters"] if item["frozen"]}
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key not in frozen)

    if how["replicate"] > 1:
        mesh = init_device_mesh("cpu", (how["replicate"], how["shard"]), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (how["shard"],))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=how["free"])
    fully_shard(model, mesh=mesh, reshard_after_forward=how["free"])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=how["lr"], betas=(0.9, 0.95),
                                  weight_decay=0.1)

    losses, norms = [], []
    mine = how["batch"] // ranks // how["microbatches"]
    for step in range(how["steps"]):
        tokens = written.read(f"tokens{step}", (how["batch"], 33)).long()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(how["microbatches"]):
            model.set_requires_gradient_sync(micro + 1 == how["microbatches"])
            part = tokens[(rank * how["microbatches"] + micro) * mine:][:mine]
            loss = F.cross_entropy(model(part[:, :-1]).logits.flatten(0, 1), part[:, 1:].flatten())
            (loss / how["microbatches"]).backward()
            total += loss.item() / how["microbatches"]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    if rank == 0:
        (pathlib.Path(folder) / "theirs.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    dist.barrier()
    # Threads of its process groups still run when PyTorch's own statics go, which ends about half of such runs with SIGABRT.
    os._exit(0)


if __name__ == "__main__":
    main()
