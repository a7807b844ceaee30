"""What may be assigned of chapter 33: cases by seed for its exercises, and questions."""

from minigen_course.grading.question import Question, Written
from minigen_course.grading.varied import Varied

VARIED: dict[str, Varied] = {}
QUESTIONS: dict[str, Question] = {}
WRITTEN: dict[str, Written] = {}
