#!/usr/bin/env bash
# Makes a Python environment with what Bonfire is compared with: PyTorch, transformers, TensorBoard. Nothing that a user
# runs needs it, only `make bench` and `make test-peers`. Does nothing where it is complete.
#
# peers.sh FOLDER (about 5 GB)
set -euo pipefail

folder=${1:?peers.sh FOLDER}
wanted=$(cd "$(dirname "$0")" && pwd)/peers.txt
if cmp -s "$wanted" "$folder/complete"; then exit 0; fi

if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
fi
echo "making the peers' environment in $folder (about 5 GB, some minutes)" >&2
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --no-cache-dir -r "$wanted"
"$folder/bin/python" -c 'import torch, transformers, tensorboard; print("torch", torch.__version__, "transformers", transformers.__version__)' >&2
cp "$wanted" "$folder/complete"
