"""The program a provider runs."""
