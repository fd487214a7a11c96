"""Who gets which samples: whole or cut by rows, to ranks of equal or different speeds."""
