# SPDX-License-Identifier: Apache-2.0
"""The boxes of the picture, one file each; `base` has their contracts."""
