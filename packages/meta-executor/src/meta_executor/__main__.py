"""``python -m meta_executor``: the command, where its script is not on the path."""

from meta_executor.cli import main

main()
