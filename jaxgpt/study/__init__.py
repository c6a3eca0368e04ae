# SPDX-License-Identifier: Apache-2.0
"""Looking at runs and models: pictures, and loggers of others."""
