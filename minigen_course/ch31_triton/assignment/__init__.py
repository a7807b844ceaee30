"""What may be assigned of chapter 31: cases by seed for its exercises, and questions."""
