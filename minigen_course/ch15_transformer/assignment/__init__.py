"""What may be assigned of chapter 15: cases by seed for its exercises, and questions."""
