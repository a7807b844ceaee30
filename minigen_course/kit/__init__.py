"""The instructor's kit: grade a class's submissions, and write marks and feedback."""
