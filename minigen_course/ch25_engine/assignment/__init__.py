"""What may be assigned of chapter 25: cases by seed for its exercises, and questions."""
