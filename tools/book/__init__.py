"""The book: all chapters as one static site, with explorables that need no kernel."""
