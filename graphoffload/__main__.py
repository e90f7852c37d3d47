"""The command line: what this GPU can do, what a plan for a model would be, any script as it is, and what steps really take.

    python -m graphoffload hardware [NAME] [--list]
    python -m graphoffload explain script.py:build --hardware h200-sxm --device-budget 40GiB --out pictures
    python -m graphoffload estimate config.json --tokens 8192 --cards h100-sxm
    python -m graphoffload run --device-budget 40GiB torchrun train.py --lr 1e-4
    python -m graphoffload bench --model llama4k --variants checkpoint over:8.6GB

`build` is a function of the script without arguments that returns (model, args), (model, args, kwargs) or (model, kwargs): args
a tuple or list, kwargs a dict. Nothing is computed and no memory is taken where the model is on the meta device.

Exit status: 0, done; 2, the budget cannot be met; 1, everything else, with one line on stderr that says what and what to do.
Every field of OffloadConfig is an option, read as in its environment variable. docs/cli.md has examples.
"""

from __future__ import annotations

import sys

from graphoffload.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__ or ""))
