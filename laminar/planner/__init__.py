"""Finding the plan: which cells of the space there are, what each could take at least, and which plan is best."""
