"""Ravnest: train one model together on ordinary, unequal PCs over the internet."""
