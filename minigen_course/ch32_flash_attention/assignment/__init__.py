"""What may be assigned of chapter 32: cases by seed for its exercises, and questions."""
