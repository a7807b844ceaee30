"""What the project's commands are made of; standard library only where it sets things up."""
