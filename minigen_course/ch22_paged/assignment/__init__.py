"""What may be assigned of chapter 22: cases by seed for its exercises, and questions."""
