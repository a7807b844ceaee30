"""What may be assigned of chapter 33: cases by seed for its exercises, and questions."""
