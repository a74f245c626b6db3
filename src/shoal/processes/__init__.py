"""What a child process shares with its parent: pipes, and what this machine is like."""
