# SPDX-License-Identifier: Apache-2.0
"""Train a model: `python train.py --help`."""

from jaxgpt.cli import train_main

if __name__ == "__main__":
    raise SystemExit(train_main())
