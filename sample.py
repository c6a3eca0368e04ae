# SPDX-License-Identifier: Apache-2.0
"""Print text that a trained model makes: `python sample.py --help`."""

from jaxgpt.cli import sample_main

if __name__ == "__main__":
    raise SystemExit(sample_main())
