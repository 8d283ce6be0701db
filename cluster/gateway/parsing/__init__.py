"""The text of an answer -> what it says, thinks and calls."""
