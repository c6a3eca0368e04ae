"""jaxgpt."""
