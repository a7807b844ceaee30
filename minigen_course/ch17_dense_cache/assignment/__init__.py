"""What may be assigned of chapter 17: cases by seed for its exercises, and questions."""
