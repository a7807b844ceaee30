"""What learners are met with: measured values, and checks of what they build."""
