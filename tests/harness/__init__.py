"""What the suite does about slow machines, tests that hang, and what they leave."""
