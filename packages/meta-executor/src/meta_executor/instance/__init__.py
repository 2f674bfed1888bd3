"""One instance: its launcher and guards, rank 0's API, the proxy, and a rank's entry."""
