"""What may be assigned of chapter 52: cases by seed for its exercises, and questions."""
