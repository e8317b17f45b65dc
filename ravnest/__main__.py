"""`python -m ravnest` is the same as `ravnest`."""

from ravnest.cli.main import main

main()
