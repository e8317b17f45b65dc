"""The provider's side of `ravnest join`: a page that shows what runs on this PC, and takes it back."""
