"""Parts of a model that can't be traced: marked by the user or found, tried, and run as they are."""
