"""A plan as people see it: JSON, sentences, a terminal page, a picture."""
