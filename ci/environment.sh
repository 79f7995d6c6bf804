# SPDX-License-Identifier: Apache-2.0
# Sourced by the commands beside it: goes to the repository's root and into a virtual environment with everything
# installed, made on first use. Torch comes first: as a dependency of another package pip may pick another build.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$0: needs Python 3.11 or newer, $python is $("$python" --version); name another with PYTHON=..." >&2
    exit 2
}
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
stamp=.venv/installed
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ ci/constraints.txt -nt "$stamp" ]; then
    pip=(.venv/bin/python -m pip install --quiet --constraint ci/constraints.txt)
    "${pip[@]}" torch
    if [ "$(uname)" = Linux ]; then # there is no DeepSpeed for other systems; its setup imports torch
        "${pip[@]}" setuptools wheel
        DS_ACCELERATOR=cpu "${pip[@]}" --no-deps --no-build-isolation deepspeed
    fi
    "${pip[@]}" --editable '.[dev]'
    # Their adapters are tested. They ask for much that no loss needs, some for another torch.
    "${pip[@]}" --no-deps cut-cross-entropy liger-kernel openrlhf torchtune trl verl
    touch "$stamp"
fi
. .venv/bin/activate
