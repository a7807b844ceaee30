"""What may be assigned of chapter 12: cases by seed for its exercises, and questions."""
