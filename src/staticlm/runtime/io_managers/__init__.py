"""What a runner does with a program's inputs and outputs, by I/O contract."""
