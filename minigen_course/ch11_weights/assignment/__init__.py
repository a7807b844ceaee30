"""What may be assigned of chapter 11: cases by seed for its exercises, and questions."""
