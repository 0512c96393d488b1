"""``python -m forebay`` is the ``forebay`` command."""

from .cli import main

main()
