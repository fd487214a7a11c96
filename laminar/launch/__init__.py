"""Ranks on this machine: started, watched and stopped, and whose fault it was."""
