# SPDX-License-Identifier: Apache-2.0
"""From a trained model to text."""
