# SPDX-License-Identifier: Apache-2.0
"""What a run will need, before it is paid for: memory, time, traffic, days and cost.

`docs/planning.md` has the formulas, and how far they were off where they were measured.
"""
