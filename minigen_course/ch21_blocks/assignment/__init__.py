"""What may be assigned of chapter 21: cases by seed for its exercises, and questions."""
