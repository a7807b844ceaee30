"""What the command line shows: each command's work, one module each."""
