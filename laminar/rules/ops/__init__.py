"""Rules by op: tables of one line per op, small functions where a line does not say it, ops written out."""
