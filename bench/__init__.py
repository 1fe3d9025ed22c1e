"""Measurements of cuscan on the GPU that is there: `python -m bench`."""
