"""From one placement to another: chains of collectives on one mesh, and messages between two."""
