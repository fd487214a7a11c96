"""Recording: stamps of what ranks really did, as timelines of the type that predictions have."""
