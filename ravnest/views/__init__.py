"""What people see: text and pictures."""
