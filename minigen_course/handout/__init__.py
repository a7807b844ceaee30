"""What a learner is given and hands in: notebooks, exercises, plain files, and answers in them."""
