"""`python -m ravnest` is the same as `ravnest`."""

from ravnest.cli import main

main()
