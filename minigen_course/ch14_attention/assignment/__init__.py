"""What may be assigned of chapter 14: cases by seed for its exercises, and questions."""
