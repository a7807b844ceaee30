"""What may be assigned of chapter 13: cases by seed for its exercises, and questions."""
