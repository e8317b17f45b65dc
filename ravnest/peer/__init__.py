"""The program a provider runs: it hosts, trains and averages one stage."""
