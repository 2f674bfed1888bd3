"""Gather and scatter: by host, by thread, by device."""
