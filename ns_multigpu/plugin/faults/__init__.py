"""What can go wrong while a run goes on, who notices, and how it is told."""
