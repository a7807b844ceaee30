"""What may be assigned of chapter 42: cases by seed for its exercises, and questions."""
