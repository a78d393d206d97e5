"""One file per command: `main` parses words and answers with an exit code, `run` is the program around it."""
