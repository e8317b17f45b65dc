"""What each command of `ravnest` does; everything heavy is imported where it is needed."""
