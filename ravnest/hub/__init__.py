"""The meeting place: who is here, which plan holds, what is leased, averaged and kept. No torch."""
