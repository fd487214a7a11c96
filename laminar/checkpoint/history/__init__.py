"""Which checkpoints there are: committed, referred to by runs, kept or dropped, and what nobody refers to removed."""
